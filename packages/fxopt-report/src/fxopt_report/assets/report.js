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

  // Modules fold: a box stands for all nodes of a module, and rows that nothing visible needs are closed.
  const around = data.scopes.map((scope) => { const parts = scope.split("."); return scope ? parts.map((_, i) => parts.slice(0, i + 1).join(".")) : []; });
  const depthOf = (path) => path.split(".").length;
  const originals = nodes.name.length, members = new Map(), boxes = new Map(), folded = new Set();
  const put = (lists, key, value) => { if (lists.has(key)) lists.get(key).push(value); else lists.set(key, [value]); };
  for (let node = 0; node < originals; node++) for (const path of around[nodes.scope[node]]) put(members, path, node);
  for (const [path, list] of members) if (list.length < 2) members.delete(path);
  const deepest = Math.max(0, ...[...members.keys()].map(depthOf));
  let level = deepest + 1;
  const foldOf = (node) => (folded.size && node < originals ? around[nodes.scope[node]].find((path) => folded.has(path)) : undefined);
  const count = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;
  function boxOf(path) {
    if (!boxes.has(path)) {
      const list = members.get(path), changed = list.filter((node) => nodes.status[node] !== "kept").length;
      const facts = { name: path, op: "", category: "folded", label: path.length > 30 ? `…${path.slice(-29)}` : path, target: path, module: "", value: "",
        caption: count(list.length, "node") + (changed ? `, ${changed} changed` : ""), arguments: "", former: "", links: [], sites: [], frame: -1,
        status: changed ? "changed" : "kept", refused: Number(list.some((node) => nodes.refused[node])), scope: nodes.scope[list[0]] };
      boxes.set(path, nodes.name.length);
      for (const key in facts) nodes[key].push(facts[key]);
    }
    return boxes.get(path);
  }
  const whole = panes.map(({ nodes: list, xs, ys, widths, edges, far_edges }) => ({ list, xs, ys, widths, edges, far_edges })), total = data.total;
  const rowOf = (y) => Math.round((y - HALF) / data.row);
  function refold() {
    const rows = new Set(), inside = new Map(), above = new Map(), below = new Map(), first = new Map();
    for (const pane of whole) {
      const row = new Map(pane.list.map((node, i) => [node, rowOf(pane.ys[i])]));
      for (const [node, at] of row) {
        const path = foldOf(node);
        if (path === undefined) rows.add(at); else put(inside, path, at);
      }
      for (const [one, other] of pane.edges.concat(pane.far_edges)) {
        const from = foldOf(one), to = foldOf(other);
        if (to !== undefined && from === undefined) above.set(to, Math.max(row.get(one), above.get(to) ?? -1));
        if (from !== undefined && to === undefined) below.set(from, Math.min(row.get(other), below.get(from) ?? Infinity));
      }
    }
    for (const [path, list] of inside) { // under what the module reads, and above what reads it
      const last = below.get(path) ?? Infinity, free = list.filter((row) => row > (above.get(path) ?? -1) && row < last);
      first.set(path, Math.min(...(free.length ? free : list)));
      rows.add(first.get(path));
    }
    const places = new Map([...rows].sort((a, b) => a - b).map((row, i) => [row, i]));
    data.total = folded.size ? (places.size - 1) * data.row + data.height : total;
    panes.forEach((pane, k) => {
      const from = whole[k], shown = new Map(), groups = new Map();
      from.list.forEach((node, i) => {
        const path = foldOf(node);
        if (path !== undefined) { put(groups, path, from.xs[i]); return; }
        shown.set(node, { node, x: from.xs[i], y: places.get(rowOf(from.ys[i])) * data.row + HALF, width: from.widths[i] });
      });
      for (const [path, xs] of groups) {
        const node = boxOf(path), letters = Math.max(nodes.label[node].length * 8.4 + 26, nodes.caption[node].length * 6.75 + 10);
        shown.set(node, { node, x: xs.reduce((sum, x) => sum + x, 0) / xs.length, y: places.get(first.get(path)) * data.row + HALF, width: letters + 13 });
      }
      const list = [...shown.values()].sort((a, b) => a.y - b.y || a.x - b.x);
      if (groups.size) list.forEach((each, i) => { // boxes push what is beside them
        const left = list[i - 1];
        if (left && left.y === each.y) each.x = Math.max(each.x, left.x + (left.width + each.width) / 2 + 22);
      });
      const at = (node) => shown.get(foldOf(node) === undefined ? node : boxOf(foldOf(node)));
      const edges = new Map(), far = [];
      const join = (one, other, points) => {
        const a = at(one), b = at(other), key = `${a.node} ${b.node}`;
        if (a === b || edges.has(key)) return;
        const ends = [a.x, a.y + HALF, b.x, b.y - HALF];
        if (a.node < originals && b.node < originals && points) {
          const bends = [];
          for (let i = 2; i < points.length - 2; i += 2) {
            const row = rowOf(points[i + 1]);
            if (places.has(row)) bends.push(points[i], points[i + 1] + (places.get(row) - row) * data.row);
          }
          edges.set(key, [a.node, b.node, [...ends.slice(0, 2), ...bends, ...ends.slice(2)]]);
        } else if ((a.node < originals && b.node < originals) || b.y - a.y > data.reach) far.push([a.node, b.node]);
        else edges.set(key, [a.node, b.node, ends]);
      };
      for (const [one, other, points] of from.edges) join(one, other, points);
      for (const [one, other] of from.far_edges) join(one, other);
      pane.nodes = list.map((each) => each.node);
      for (const [key, value] of [["xs", "x"], ["ys", "y"], ["widths", "width"]]) pane[key] = list.map((each) => each[value]);
      pane.edges = [...edges.values()].sort((a, b) => a[2][1] - b[2][1]);
      pane.tops = pane.edges.map((edge) => edge[2][1]);
      pane.far_edges = far;
      pane.far = new Map();
      for (const [one, other] of far) put(pane.far, other, one);
      pane.place = new Map(pane.nodes.map((node, i) => [node, i]));
      pane.width = Math.max(...list.map((each) => each.x + each.width / 2));
    });
    $("depth").textContent = folded.size ? `${count(folded.size, "module")} folded` : "";
    rule();
    redraw(true);
  }
  function foldTo(wanted) {
    level = Math.max(1, Math.min(deepest + 1, wanted));
    folded.clear();
    for (const path of members.keys()) if (depthOf(path) === level) folded.add(path);
    clear();
    refold();
    fit();
  }
  function foldOne(path, on) {
    if (on) folded.add(path); else folded.delete(path);
    refold();
    choose(on ? [boxOf(path)] : members.get(path).slice(0, 1));
  }
  function unfoldAround(list) {
    const paths = list.flatMap((node) => (node < originals ? around[nodes.scope[node]].filter((path) => folded.has(path)) : []));
    for (const path of paths) folded.delete(path);
    if (paths.length) refold();
  }
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
    unfoldAround(list);
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
  function foldButton(path, on) {
    const button = html("button", "link", on ? `fold ${path}` : "unfold", side);
    button.type = "button";
    button.addEventListener("click", () => foldOne(path, on));
  }
  function describeBox(node) {
    const path = nodes.name[node], list = members.get(path);
    html("h3", "", path, side);
    html("p", "kinds", nodes.caption[node], side);
    foldButton(path, false);
    for (const [kind, word] of Object.entries({ removed: "Removed", added: "New", changed: "Changed in place", kept: "Unchanged" })) links(word, list.filter((each) => nodes.status[each] === kind));
    side.scrollTop = 0;
  }
  function describe(node) {
    side.textContent = "";
    if (node >= originals) { describeBox(node); return; }
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
    const inside = around[nodes.scope[node]].filter((path) => members.has(path)).reverse();
    if (inside.length) html("h4", "", "Part of", side);
    for (const path of inside) foldButton(path, true);
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
  // The graphs that are open, whole, as a drawing of its own: in the colours of the page, with no script.
  function drawing() {
    const shown = open(), margin = 20, title = 26;
    const width = shown.reduce((sum, pane) => sum + pane.width + 2 * margin, 0), height = data.total + 2 * margin + title;
    const svg = make("svg", { xmlns: SVG, width, height, viewBox: `0 0 ${width} ${height}` });
    const colours = getComputedStyle(document.documentElement);
    const rules = [...document.styleSheets[0].cssRules].map((rule) => rule.cssText).filter((text) => text.startsWith("svg "));
    make("style", {}, svg, rules.join("\n").replace(/var\((--[\w-]+)\)/g, (_, name) => colours.getPropertyValue(name).trim()));
    make("rect", { width, height, fill: colours.getPropertyValue("--page").trim() }, svg);
    let left = margin;
    for (const pane of shown) {
      make("text", { x: left, y: margin, "font-family": "system-ui, sans-serif", "font-size": 14, fill: colours.getPropertyValue("--muted").trim() }, svg, pane.frame.querySelector("h3").textContent);
      const world = make("g", { transform: `translate(${left} ${margin + title})` }, svg);
      const copy = { ...pane, lines: make("g", {}, world), boxes: make("g", {}, world) };
      drawEdges(copy, -Infinity, Infinity, true);
      pane.nodes.forEach((_, i) => drawNode(copy, i, copy.boxes));
      left += pane.width + 2 * margin;
    }
    return { text: new XMLSerializer().serializeToString(svg), width, height };
  }
  function keep(blob, suffix) {
    const link = html("a"), name = document.title.replace(/[^\w.-]+/g, "-").replace(/^-+|-+$/g, "") || "graph";
    link.href = URL.createObjectURL(blob);
    link.download = `${name}.${suffix}`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  }
  const saveSvg = () => keep(new Blob([drawing().text], { type: "image/svg+xml" }), "svg");
  function savePng() {
    const { text, width, height } = drawing(), image = new Image();
    // Browsers have no larger canvases.
    const scale = Math.min(2, 16000 / width, 16000 / height, Math.sqrt(1e8 / (width * height)));
    image.onload = () => {
      const canvas = html("canvas");
      canvas.width = Math.max(1, Math.floor(width * scale));
      canvas.height = Math.max(1, Math.floor(height * scale));
      canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
      canvas.toBlob((blob) => keep(blob, "png"), "image/png");
    };
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  }
  const actions = {
    svg: saveSvg, png: savePng, in: () => zoom(1.3), out: () => zoom(1 / 1.3), fit, one: () => setScale(1), next: () => step(1), previous: () => step(-1),
    fold: () => foldTo(level > deepest ? 1 : level - 1), unfold: () => foldTo(level + 1),
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
    const keys = { "+": actions.in, "=": actions.in, "-": actions.out, 0: fit, 1: actions.one, n: actions.next, p: actions.previous, f: actions.fold, u: actions.unfold, Escape: clear, "/": () => search.focus() };
    if (keys[event.key]) { keys[event.key](); event.preventDefault(); }
  });
  new ResizeObserver(() => { rule(); redraw(true); }).observe($("stage"));

  if (!deepest) for (const name of ["fold", "unfold"]) document.querySelector(`[data-do="${name}"]`).disabled = true;
  rule();
  start();
  draw(true);
  document.documentElement.dataset.ready = "true";
})();
