"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const data = JSON.parse($("fxopt-data").textContent);
  const nodes = data.nodes;
  const SVG = "http://www.w3.org/2000/svg";
  const SIGNS = { removed: "−", added: "+", changed: "~", refused: "!" };
  const MARKS = ["kept", "refused", "changed", "removed", "added", "hit", "chosen"];
  const WORDS = { removed: "removed", added: "new", changed: "changed in place", kept: "unchanged" };
  const NEAR = 0.36, LARGEST = 3, HALF = data.height / 2;
  const view = { scale: 1, y: 0 };
  let chosen = new Set(), hits = new Set(), hitList = [], hit = -1, stop = -1, asked = false;
  document.documentElement.classList.add("scripted");

  const make = (tag, attributes, parent, text) => {
    const element = document.createElementNS(SVG, tag);
    for (const key in attributes) element.setAttribute(key, attributes[key]);
    if (text !== undefined) element.textContent = text;
    if (parent) parent.appendChild(element);
    return element;
  };
  const html = (tag, className, text, parent) => {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    if (parent) parent.appendChild(element);
    return element;
  };

  const panes = data.panes.map((given) => {
    const frame = $(given.id), svg = frame.querySelector(".view"), ruler = frame.querySelector(".ruler");
    const pane = { ...given, frame, svg, ruler, x: 0, place: new Map(), drawn: null };
    given.nodes.forEach((node, i) => pane.place.set(node, i));
    pane.far = new Map();
    for (const [from, to] of given.far_edges) pane.far.set(to, (pane.far.get(to) || []).concat(from));
    pane.users = new Map();
    pane.inputs = new Map();
    given.nodes.forEach((node, i) => {
      pane.inputs.set(node, given.inputs[i]);
      for (const input of given.inputs[i]) pane.users.set(input, (pane.users.get(input) || []).concat(node));
    });
    pane.world = make("g", {}, svg);
    pane.lines = make("g", {}, pane.world);
    pane.boxes = make("g", {}, pane.world);
    pane.marks = make("g", {}, ruler);
    pane.window = make("rect", { class: "window", x: 0, width: 14, y: 0, height: 0 }, ruler);
    return pane;
  });
  const open = () => panes.filter((pane) => !pane.frame.hidden);

  const size = (pane) => ({ width: pane.svg.clientWidth || 600, height: pane.svg.clientHeight || 500 });
  const mark = (node) => (chosen.has(node) ? "chosen" : hits.has(node) ? "hit" : look(node));
  const look = (node) => (nodes.status[node] !== "kept" ? nodes.status[node] : nodes.refused[node] ? "refused" : "kept");

  // Where a sorted list of numbers reaches a value.
  const reach = (list, value) => {
    let low = 0, high = list.length;
    while (low < high) { const middle = (low + high) >> 1; if (list[middle] < value) low = middle + 1; else high = middle; }
    return low;
  };

  const curve = (points) => {
    let path = `M${points[0]} ${points[1]}`;
    for (let i = 2; i < points.length; i += 2) {
      const [x0, y0, x1, y1] = [points[i - 2], points[i - 1], points[i], points[i + 1]], bend = (y1 - y0) / 2;
      path += `C${x0} ${y0 + bend} ${x1} ${y1 - bend} ${x1} ${y1}`;
    }
    return path;
  };

  // "float32[2, 8, 384]" as it stands beside an edge: 2 × 8 × 384.
  const sizes = (value) => { const found = /\[(.+)\]$/.exec(value); return found ? found[1].split(", ").map((size) => (size.length > 6 ? "…" : size)).join(" × ") : ""; };

  function drawNode(pane, i, parent) {
    const node = pane.nodes[i], width = pane.widths[i], status = mark(node), base = look(node);
    const group = make("g", { class: `node ${nodes.category[node]} ${base}${status !== base ? " " + status : ""}`,
      transform: `translate(${pane.xs[i] - width / 2} ${pane.ys[i] - HALF})`, "data-node": node, role: "button",
      "aria-label": `${nodes.label[node]} ${nodes.name[node]}, ${WORDS[nodes.status[node]]}` }, parent);
    make("title", {}, group, `${nodes.name[node]}\n${nodes.module[node] || nodes.target[node]}`);
    make("rect", { class: "box", width, height: data.height, rx: 6 }, group);
    make("rect", { class: "band", x: 3, y: 5, width: 3.5, height: data.height - 10, rx: 1.75 }, group);
    make("text", { x: 13, y: nodes.caption[node] ? 17 : 24 }, group, nodes.label[node]);
    if (nodes.caption[node]) make("text", { class: "caption", x: 13, y: 32 }, group, nodes.caption[node]);
    if (SIGNS[base]) make("text", { class: "sign", x: width - 7, y: 16 }, group, SIGNS[base]);
    const shape = sizes(nodes.value[node]);
    if (shape && (pane.users.get(node) || []).length) make("text", { class: "shape", x: width / 2 + 5, y: data.height + 11 }, group, shape);
    const far = pane.far.get(node);
    if (far) {
      const more = far.length > 1 ? ` +${far.length - 1}` : "", name = nodes.name[far[0]];
      const room = Math.max(4, Math.floor(width / 6.4) - 4 - more.length);
      make("text", { class: "far", x: 2, y: -4 }, group, `↑ ${name.length > room ? name.slice(0, room - 1) + "…" : name}${more}`);
    }
  }

  function drawEdges(pane, top, bottom, lit) {
    const parts = { "": [], on: [], off: [], lit: [] };
    let tips = "";
    const last = reach(pane.tops, bottom);
    for (let k = reach(pane.tops, top - data.reach); k < last; k++) {
      const [from, to, points] = pane.edges[k];
      if (points[points.length - 1] < top) continue;
      const touched = chosen.has(from) || chosen.has(to);
      const kind = touched ? "lit" : nodes.status[from] === "removed" || nodes.status[to] === "removed" ? "off"
        : nodes.status[from] === "added" || nodes.status[to] === "added" ? "on" : "";
      parts[kind].push(curve(points));
      const x = points[points.length - 2], y = points[points.length - 1];
      tips += `M${x - 3} ${y - 5}L${x + 3} ${y - 5}L${x} ${y}Z`;
    }
    if (lit) for (const [from, to] of pane.far_edges) if (chosen.has(from) || chosen.has(to)) {
      const a = pane.place.get(from), b = pane.place.get(to);
      parts.lit.push(curve([pane.xs[a], pane.ys[a] + HALF, pane.xs[b], pane.ys[b] - HALF]));
    }
    for (const kind in parts) if (parts[kind].length) make("path", { class: `edge ${kind}`, d: parts[kind].join("") }, pane.lines);
    if (lit) make("path", { class: "tip", d: tips }, pane.lines);
  }

  function fill(pane, top, bottom) {
    pane.lines.textContent = pane.boxes.textContent = "";
    const near = view.scale >= NEAR;
    drawEdges(pane, top, bottom, near);
    const first = reach(pane.ys, top - HALF), last = reach(pane.ys, bottom + HALF);
    if (near) { for (let i = first; i < last; i++) drawNode(pane, i, pane.boxes); return; }
    const paths = {};
    for (let i = first; i < last; i++) {
      const kind = mark(pane.nodes[i]), width = pane.widths[i];
      (paths[kind] = paths[kind] || []).push(`M${pane.xs[i] - width / 2} ${pane.ys[i] - HALF}h${width}v${data.height}h${-width}Z`);
    }
    for (const kind of MARKS) if (paths[kind]) make("path", { class: `far-nodes ${kind}`, d: paths[kind].join("") }, pane.boxes);
  }

  function draw(again) {
    for (const pane of open()) {
      const { width, height } = size(pane), span = height / view.scale;
      const top = view.y - span / 2, bottom = view.y + span / 2;
      const drawn = pane.drawn;
      if (again || !drawn || top < drawn.top || bottom > drawn.bottom || (view.scale >= NEAR) !== drawn.near) {
        pane.drawn = { top: top - span / 2, bottom: bottom + span / 2, near: view.scale >= NEAR };
        fill(pane, pane.drawn.top, pane.drawn.bottom);
      }
      pane.world.setAttribute("transform", `translate(${width / 2 - (pane.width / 2 + pane.x) * view.scale} ${height / 2 - view.y * view.scale}) scale(${view.scale})`);
      const ratio = height / Math.max(data.total, 1);
      pane.window.setAttribute("y", Math.max(0, top * ratio));
      pane.window.setAttribute("height", Math.max(4, Math.min(height, span * ratio)));
    }
  }
  const redraw = (again) => {
    asked = asked || (again ? "again" : "move");
    if (again) asked = "again";
    if (redraw.waiting) return;
    redraw.waiting = true;
    requestAnimationFrame(() => { redraw.waiting = false; const all = asked === "again"; asked = false; draw(all); });
  };

  function rule() {
    for (const pane of panes) {
      const ratio = size(pane).height / Math.max(data.total, 1), paths = {};
      pane.marks.textContent = "";
      pane.nodes.forEach((node, i) => {
        const kind = hits.has(node) ? "hit" : look(node);
        if (kind !== "kept") (paths[kind] = paths[kind] || []).push(`M2 ${(pane.ys[i] * ratio).toFixed(1)}h10`);
      });
      for (const kind in paths) make("path", { class: kind, d: paths[kind].join("") }, pane.marks);
    }
  }

  function zoom(factor, pane, px, py) {
    const old = view.scale, { width, height } = size(pane || open()[0]);
    view.scale = Math.min(LARGEST, Math.max(Math.min(0.02, fitScale()), old * factor));
    if (pane) {
      const dx = (px - width / 2) * (1 / old - 1 / view.scale);
      for (const each of panes) each.x += dx;
      view.y += (py - height / 2) * (1 / old - 1 / view.scale);
    }
    $("zoom").textContent = `${Math.round(view.scale * 100)} %`;
    redraw();
  }
  const fitScale = () => Math.min(...open().map((pane) => {
    const { width, height } = size(pane);
    return Math.min((width - 30) / pane.width, (height - 60) / Math.max(data.total, 1), 1);
  }));
  const setScale = (scale) => zoom(scale / view.scale);
  function fit() { for (const pane of panes) pane.x = 0; view.y = data.total / 2; setScale(fitScale()); }
  // The beginning of the graphs, as wide as the panes.
  function start() {
    const scales = open().map((pane) => (size(pane).width - 40) / pane.width);
    for (const pane of panes) pane.x = 0;
    setScale(Math.min(1, Math.max(NEAR, Math.min(...scales))));
    view.y = (size(open()[0]).height / 2 - 44) / view.scale;
    redraw();
  }
  function pan(dx, dy) { for (const pane of panes) pane.x += dx / view.scale; view.y += dy / view.scale; redraw(); }

  // Bring nodes into the middle of every pane that has them, or what they are linked with.
  function center(list) {
    const counterparts = list.concat(list.flatMap((node) => nodes.links[node]));
    let height = null, room = LARGEST;
    for (const pane of open()) {
      const own = list.filter((node) => pane.place.has(node));
      const use = own.length ? own : counterparts.filter((node) => pane.place.has(node));
      if (!use.length) continue;
      const places = use.map((node) => pane.place.get(node));
      pane.x = (Math.min(...places.map((i) => pane.xs[i])) + Math.max(...places.map((i) => pane.xs[i]))) / 2 - pane.width / 2;
      const ys = places.map((i) => pane.ys[i]);
      const wide = Math.max(...places.map((i) => pane.xs[i] + pane.widths[i] / 2)) - Math.min(...places.map((i) => pane.xs[i] - pane.widths[i] / 2));
      room = Math.min(room, (size(pane).width - 50) / wide);
      if (height === null || own.length) height = (Math.min(...ys) + Math.max(...ys)) / 2;
    }
    if (height !== null) view.y = height;
    const wanted = Math.max(Math.min(view.scale < 0.5 ? 0.9 : view.scale, room), 0.5);
    if (wanted !== view.scale) setScale(wanted); else redraw();
  }

  // Scroll panes sideways that contain chosen nodes but show none of them.
  function reveal() {
    for (const pane of open()) {
      const places = [...chosen].filter((node) => pane.place.has(node)).map((node) => pane.place.get(node));
      const middle = pane.width / 2 + pane.x, half = size(pane).width / 2 / view.scale;
      if (places.length && !places.some((i) => Math.abs(pane.xs[i] - middle) < half)) pane.x = pane.xs[places[0]] - pane.width / 2;
    }
    redraw();
  }

  function choose(list, options = {}) {
    chosen = new Set(list.concat(list.flatMap((node) => nodes.links[node])));
    if (options.site === undefined && list.length === 1) describe(list[0]); else if (options.site !== undefined) describeSite(options.site, list);
    if (list.length && options.center !== false) center(list);
    redraw(true);
  }

  const side = $("side"), rest = side.innerHTML;
  function links(title, list) {
    if (!list.length) return;
    html("h4", "", `${title}${list.length > 1 ? ` (${list.length})` : ""}`, side);
    const box = html("div", "", undefined, side);
    const show = (from, to) => list.slice(from, to).forEach((node) => {
      const button = html("button", `link ${nodes.status[node]}`, nodes.name[node], box);
      button.type = "button";
      button.title = `${nodes.label[node]}: ${nodes.target[node]}`;
      button.addEventListener("click", () => choose([node]));
    });
    show(0, 24);
    if (list.length > 24) {
      const more = html("button", "link", `${list.length - 24} more`, box);
      more.type = "button";
      more.addEventListener("click", () => { more.remove(); show(24, list.length); });
    }
  }
  function fact(title, text) {
    if (!text) return;
    html("h4", "", title, side);
    html("pre", "", text, side);
  }
  function source(frame) {
    if (frame < 0) return;
    const [place, where, code] = data.frames[frame];
    fact("In the model's source", `${place} in ${where}${code ? "\n    " + code : ""}`);
  }
  function siteLinks(list) {
    for (const site of list) {
      const entry = data.sites[site], line = html("p", "", undefined, side);
      html("span", `tag ${entry.rewritten ? "good" : "held"}`, entry.rewritten ? "rewritten" : "refused", line);
      line.append(` ${entry.pass}: `);
      const link = html("a", "", entry.site, line);
      link.href = `#site-${site}`;
      if (entry.message) html("p", "hint", `${entry.reason}: ${entry.message}`, side);
    }
  }
  function describe(node) {
    side.textContent = "";
    const status = nodes.status[node];
    html("h3", "", nodes.label[node], side);
    html("p", "kinds mono", nodes.name[node], side);
    const line = html("p", "", undefined, side);
    html("span", `tag ${{ added: "good", removed: "bad", changed: "quiet" }[status] || "quiet"}`, WORDS[status], line);
    siteLinks(nodes.sites[node]);
    links(status === "removed" ? "Became" : "Came from", nodes.links[node].filter((each) => each !== node));
    fact("Operation", `${nodes.op[node]} ${nodes.target[node]}`);
    fact("Module", nodes.module[node]);
    fact("Value", nodes.value[node]);
    fact("Arguments", nodes.arguments[node]);
    fact("Arguments before", nodes.former[node]);
    for (const pane of panes) if (pane.place.has(node)) {
      const where = panes.length > 1 && nodes.status[node] !== "removed" && nodes.status[node] !== "added" ? ` ${pane.word}` : "";
      if (where && pane !== panes[panes.length - 1] && same(node)) continue;
      links(`Reads${same(node) ? "" : where}`, pane.inputs.get(node) || []);
      links(`Read by${same(node) ? "" : where}`, pane.users.get(node) || []);
    }
    source(nodes.frame[node]);
    side.scrollTop = 0;
  }
  const same = (node) => panes.every((pane) => pane.place.has(node)) && new Set(panes.map((pane) => `${pane.inputs.get(node)}|${pane.users.get(node) || ""}`)).size === 1;
  function describeSite(site, list) {
    side.textContent = "";
    const entry = data.sites[site];
    html("h3", "", entry ? entry.site : "Changed nodes", side);
    if (entry) siteLinks([site]);
    links("Removed", list.filter((node) => nodes.status[node] === "removed"));
    links("New", list.filter((node) => nodes.status[node] === "added"));
    links("Changed in place", list.filter((node) => nodes.status[node] === "changed"));
    links("Nodes", list.filter((node) => nodes.status[node] === "kept"));
    if (entry) source(entry.frame);
    side.scrollTop = 0;
  }
  function clear() { chosen = new Set(); stop = -1; side.innerHTML = rest; redraw(true); }

  function step(by) {
    if (!data.stops.length) return;
    stop = stop < 0 ? (by > 0 ? 0 : data.stops.length - 1) : (stop + by + data.stops.length) % data.stops.length;
    $("stop").textContent = `${stop + 1} of ${data.stops.length}`;
    choose(data.stops[stop].nodes, { site: data.stops[stop].site });
  }

  const search = $("search"), found = $("found");
  const texts = nodes.name.map((name, i) => `${name}\n${nodes.label[i]}\n${nodes.target[i]}\n${nodes.module[i]}`.toLowerCase());
  function searchFor(words) {
    const wanted = words.trim().toLowerCase().split(/\s+/).filter(Boolean);
    hitList = [];
    if (wanted.length) texts.forEach((text, node) => { if (wanted.every((word) => text.includes(word))) hitList.push(node); });
    hits = new Set(hitList);
    hit = -1;
    found.textContent = wanted.length ? `${hitList.length} found` : "";
    rule();
    redraw(true);
  }
  function nextHit(by) {
    if (!hitList.length) return;
    hit = hit < 0 ? (by > 0 ? 0 : hitList.length - 1) : (hit + by + hitList.length) % hitList.length;
    found.textContent = `${hit + 1} of ${hitList.length}`;
    choose([hitList[hit]]);
  }
  search.addEventListener("input", () => searchFor(search.value));
  search.addEventListener("keydown", (event) => {
    if (event.key === "Enter") { event.preventDefault(); nextHit(event.shiftKey ? -1 : 1); }
    if (event.key === "Escape") { search.value = ""; searchFor(""); }
  });

  for (const pane of panes) {
    const pointers = new Map();
    let moved = 0;
    pane.svg.addEventListener("wheel", (event) => {
      event.preventDefault();
      const unit = event.deltaMode === 1 ? 16 : event.deltaMode === 2 ? 400 : 1;
      if (event.shiftKey) { pan(event.deltaY * unit || event.deltaX * unit, 0); return; }
      const box = pane.svg.getBoundingClientRect();
      zoom(Math.exp(-event.deltaY * unit * (event.ctrlKey ? 0.01 : 0.0016)), pane, event.clientX - box.left, event.clientY - box.top);
    }, { passive: false });
    pane.svg.addEventListener("pointerdown", (event) => {
      pointers.set(event.pointerId, [event.clientX, event.clientY]);
      moved = 0;
    });
    pane.svg.addEventListener("pointermove", (event) => {
      const last = pointers.get(event.pointerId);
      if (!last) return;
      const [dx, dy] = [event.clientX - last[0], event.clientY - last[1]];
      moved += Math.abs(dx) + Math.abs(dy);
      if (moved > 4 && !pane.svg.hasPointerCapture(event.pointerId)) pane.svg.setPointerCapture(event.pointerId);
      if (pointers.size === 2) {
        const other = [...pointers.entries()].find(([id]) => id !== event.pointerId)[1], box = pane.svg.getBoundingClientRect();
        const apart = (point) => Math.max(20, Math.hypot(point[0] - other[0], point[1] - other[1]));
        zoom(apart([event.clientX, event.clientY]) / apart(last), pane, (event.clientX + other[0]) / 2 - box.left, (event.clientY + other[1]) / 2 - box.top);
      } else pan(-dx, -dy);
      pointers.set(event.pointerId, [event.clientX, event.clientY]);
    });
    for (const name of ["pointerup", "pointercancel"]) pane.svg.addEventListener(name, (event) => pointers.delete(event.pointerId));
    pane.svg.addEventListener("click", (event) => {
      if (moved > 4) return;
      const group = event.target.closest("[data-node]");
      if (group) { choose([Number(group.dataset.node)], { center: false }); reveal(); } else clear();
    });
    pane.svg.addEventListener("keydown", (event) => {
      const far = event.shiftKey ? 300 : 60;
      const keys = { ArrowUp: [0, -far], ArrowDown: [0, far], ArrowLeft: [-far, 0], ArrowRight: [far, 0], PageUp: [0, -500], PageDown: [0, 500] };
      if (keys[event.key] && !event.ctrlKey && !event.metaKey) { pan(...keys[event.key]); event.preventDefault(); }
      if (event.key === "Home") { view.y = 0; redraw(); event.preventDefault(); }
      if (event.key === "End") { view.y = data.total; redraw(); event.preventDefault(); }
    });
    pane.ruler.addEventListener("pointerdown", (event) => {
      const jump = (at) => { const box = pane.ruler.getBoundingClientRect(); view.y = ((at.clientY - box.top) / box.height) * data.total; if (view.scale < NEAR) setScale(0.9); else redraw(); };
      jump(event);
      pane.ruler.setPointerCapture(event.pointerId);
      pane.ruler.onpointermove = jump;
      pane.ruler.onpointerup = () => { pane.ruler.onpointermove = null; };
    });
  }
  const actions = {
    in: () => zoom(1.3), out: () => zoom(1 / 1.3), fit, one: () => setScale(1), next: () => step(1), previous: () => step(-1),
  };
  document.querySelectorAll("[data-do]").forEach((button) => button.addEventListener("click", () => actions[button.dataset.do]()));
  document.querySelectorAll("[data-open]").forEach((button) => button.addEventListener("click", () => {
    for (const pane of panes) pane.frame.hidden = button.dataset.open !== "both" && button.dataset.open !== pane.id;
    document.querySelectorAll("[data-open]").forEach((each) => each.setAttribute("aria-pressed", String(each === button)));
    redraw(true);
  }));
  document.querySelectorAll("[data-site]").forEach((button) => button.addEventListener("click", () => {
    const site = Number(button.dataset.site);
    stop = data.stops.findIndex((each) => each.site === site);
    choose(data.sites[site].nodes, { site });
    $("picture").scrollIntoView({ block: "start" });
    panes[panes.length - 1].svg.focus({ preventScroll: true });
  }));
  document.addEventListener("keydown", (event) => {
    if (event.target.matches("input, textarea, select") || event.ctrlKey || event.metaKey || event.altKey) return;
    const keys = { "+": actions.in, "=": actions.in, "-": actions.out, 0: fit, 1: actions.one, n: actions.next, p: actions.previous, Escape: clear, "/": () => search.focus() };
    if (keys[event.key]) { keys[event.key](); event.preventDefault(); }
  });
  new ResizeObserver(() => { rule(); redraw(true); }).observe($("stage"));

  rule();
  start();
  draw(true);
  document.documentElement.dataset.ready = "true";
})();
