"""Take the pictures of README and docs, light and dark, from real cells.

    python tools/take_pictures.py [--only NAME] [--theme light] [--folder FOLDER]

It takes all pictures in about ten minutes. It needs Chromium and, for the picture of a trainer, the
packages of the ecosystem tests.
"""

from __future__ import annotations

import argparse
import io
import itertools
import os
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageOps

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))

from browser import lab as front_end  # noqa: E402
from browser.lab import write_notebook  # noqa: E402

THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
SCALE = 1.5  # device pixels for a pixel of the page
MARGIN = 12  # pixels around an element of a cell
TIMEOUT = 180  # seconds until the moment of a picture
TOGGLE = "application:toggle-left-area"
LOAD = "%load_ext nbddp"
START = "%ddp start --nproc 4 --name digits"


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A notebook's cells, and the moment at which a picture of the last one is taken."""

    cells: tuple[str, ...]
    moment: str  # a pattern of a text below the last cell
    width: int = 780  # of the page; a narrower one has another layout
    opens: str = ""  # an element that is clicked first
    shows: str = ""  # the element of the cell; "" is the whole cell
    until: str = ""  # the element of the cell that is the last one in the picture


def example(page: str, place: int = 0) -> str:
    """Return a code block of a page in ``docs/``, so that the picture shows the page's example."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    return re.findall(r"^```python\n(.*?)\n```", text, re.MULTILINE | re.DOTALL)[place]


FINDINGS = "summary:has-text('possible mistake')"
SCENES = {
    "panel": Scene(
        cells=(START, example("panel")), moment="epoch 10: loss", width=980, shows=".nbddp-panel"
    ),
    "timeline": Scene(cells=(START, example("panel", 1)), moment="waited for", width=860),
    "failure": Scene(cells=(START, example("failures")), moment="Every rank keeps its variables"),
    "hang": Scene(cells=(START, example("failures", 1)), moment="no progress for", width=960),
    "debugger": Scene(cells=(START, example("debugging")), moment="(?s)in the debugger.*ipdb>"),
    "check": Scene(cells=(START, example("debugging", 1)), moment="ND201", opens=FINDINGS),
    "sweep": Scene(
        cells=(START, example("many_runs"), example("many_runs", 1)),
        moment="the code of all cells is the same",
    ),
    "trainer": Scene(
        cells=(example("trainers").replace("epochs=5", "epochs=200"), example("trainers", 1)),
        moment=r"(?s)memory.*train [3-7]\d\d/800",
        width=960,
        until=".nbddp-chart >> nth=3",
    ),
    "script": Scene(
        cells=(example("scripts"), "%ddp run --nproc 4 train.py"), moment="step 300 on rank 0"
    ),
    "nodes": Scene(
        cells=(
            "%ddp nodes --local 2 --nproc-per-node 2 --wait 120",
            example("many_runs").replace(" --nproc 4", ""),
            "%%ddp\ntrain(lr=0.1, epochs=200)",
        ),
        moment=r"\D[2-9]\d\d · ",
        width=960,
    ),
    "kit": Scene(
        cells=(START, example("training_kit")),
        moment="done on ranks",
        shows=".nbddp[role=region] >> nth=0",
    ),
}


# The animation: a rank is killed while the cell runs, and the cell heals.
PREPARE = """%%ddp
batches = nbddp.loader(nbddp.digits().train, batch_size=16)
layers = torch.nn.Flatten(), torch.nn.Linear(784, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
model = nbddp.prepare(torch.nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=0.03)
step = 0
"""
HEAL = """%%ddp --heal 1
while step < 700:
    for images, labels in batches:
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        nbddp.log(step=step, loss=loss.item())
        step += 1
"""
VIEWPORT = {"width": 960, "height": 1300}  # large enough that nothing scrolls
HEIGHT = 700  # pixels that are shown, from the top of the cell
PAUSE = 0.2  # seconds between two pictures
LAST_FRAME = 3000  # milliseconds that the last frame stays
POINTER = """([x, y]) => {
    const dot = document.querySelector("#pointer") ?? document.createElement("div");
    dot.id = "pointer";
    dot.style.cssText = `position:fixed;left:${x - 11}px;top:${y - 11}px;width:22px;height:22px;
        border-radius:50%;background:#f908;border:2px solid #f90;z-index:99;pointer-events:none`;
    document.body.append(dot);
}"""
QUALITY = 40  # below half a megabyte, with sharp letters
NO_POINTER = "document.querySelector('#pointer')?.remove()"


class Film:
    """Screenshots of a notebook's page, each shown until the next difference."""

    def __init__(self, notebook: front_end.LabNotebook, cell: int) -> None:
        self._notebook = notebook
        self._cell = cell
        box = notebook.code_cell(cell).bounding_box()
        self._clip = {**box, "height": HEIGHT}
        self._shots: list[tuple[float, Image.Image]] = []

    def record_until(self, pattern: str, *, timeout: float = 60) -> None:
        """Take screenshots until this text is shown below the cell."""
        deadline = time.monotonic() + timeout
        while not re.search(pattern, self._notebook.text(self._cell)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{pattern!r} is not in:\n{self._notebook.text(self._cell)}")
            self.record(PAUSE)

    def record(self, seconds: float) -> None:
        """Take screenshots for so long, and at least one."""
        deadline = time.monotonic() + seconds
        while True:
            began = time.monotonic()
            picture = Image.open(io.BytesIO(self._notebook.page.screenshot(clip=self._clip)))
            self._shots.append((began, picture.convert("RGB")))
            if time.monotonic() > deadline:
                return
            time.sleep(max(0.0, began + PAUSE - time.monotonic()))

    def press(self, label: str) -> None:
        """Press a button of the panel and show the pointer."""
        box = self._notebook.button(label).bounding_box()
        place = [box["x"] + box["width"] / 2, box["y"] + box["height"] / 2]
        self._notebook.page.evaluate(POINTER, place)
        self.record(3 * PAUSE)
        self._notebook.page.mouse.click(*place)
        self.record(3 * PAUSE)
        self._notebook.page.evaluate(NO_POINTER)

    def save(self, path: Path) -> None:
        """Write the animation; equal screenshots become one frame."""
        kept = [self._shots[0]]
        for at, picture in self._shots[1:]:
            if picture.tobytes() != kept[-1][1].tobytes():
                kept.append((at, picture))
        times = [at for at, _ in kept]
        lasting = [round(1000 * (b - a)) for a, b in itertools.pairwise(times)]
        first, *others = [picture for _, picture in kept]
        first.save(
            path,
            save_all=True,
            append_images=others,
            duration=[*lasting, LAST_FRAME],
            loop=0,
            quality=QUALITY,
            method=6,
        )


def take_film(lab: front_end.Lab, path: Path) -> None:
    """Record a cell that trains, loses a rank to the Kill button, and heals."""
    write_notebook(lab.notebooks / "heal.ipynb", LOAD, START, PREPARE, HEAL)
    with lab.open("heal.ipynb") as notebook:
        notebook.page.set_viewport_size(VIEWPORT)
        notebook.js(f"await window.jupyterapp.commands.execute('{TOGGLE}')")
        for cell in range(3):
            notebook.run(cell, timeout=TIMEOUT)
        notebook.code_cell(3).locator(".cm-content").click()
        film = Film(notebook, 3)
        film.record(1.0)
        notebook.page.keyboard.press("Control+Enter")
        film.record_until("Kill")
        notebook.page.locator(".nbddp-buttons select").select_option("2")
        film.record(3.0)
        film.press("Kill")
        film.press(r"Kill\?")
        film.record_until("heal")
        film.record_until("done on ranks")
        film.record(PAUSE)
        film.save(path)


def take(lab: front_end.Lab, name: str, path: Path) -> None:
    """Take a screenshot of the last cell of a scene."""
    scene = SCENES[name]
    cells = (LOAD, *scene.cells)
    last = len(cells) - 1
    write_notebook(lab.notebooks / f"{name}.ipynb", *cells)
    with lab.open(f"{name}.ipynb", scale=SCALE) as notebook:
        notebook.page.set_viewport_size({"width": scene.width, "height": 1600})
        notebook.js(f"await window.jupyterapp.commands.execute('{TOGGLE}')")
        for cell in range(last):
            notebook.run(cell, timeout=TIMEOUT)
        notebook.begin(last)
        notebook.await_text(last, scene.moment, timeout=TIMEOUT)
        shown = notebook.code_cell(last)
        if scene.opens:
            shown.locator(scene.opens).click()
        if scene.shows:
            shown = shown.locator(scene.shows)
        shown.scroll_into_view_if_needed()
        box = shown.bounding_box()
        if scene.until:
            last_shown = shown.locator(scene.until).bounding_box()
            box["height"] = last_shown["y"] + last_shown["height"] - box["y"]
        picture = Image.open(io.BytesIO(notebook.page.screenshot(clip=box))).convert("RGB")
    if scene.shows:
        picture = ImageOps.expand(picture, MARGIN, fill=picture.getpixel((0, 0)))
    picture.save(path, lossless=True, quality=100)


def main() -> None:
    names = ["heal", *SCENES]
    parser = argparse.ArgumentParser(description="Take the pictures of README and docs.")
    parser.add_argument("--only", choices=names, action="append", help="take this picture")
    parser.add_argument("--theme", choices=THEMES, action="append")
    parser.add_argument("--folder", type=Path, default=ROOT / "notebooks" / "pictures")
    args = parser.parse_args()
    for theme in args.theme or THEMES:
        os.environ["LAB_THEME"] = THEMES[theme]
        with tempfile.TemporaryDirectory() as root, front_end.Lab(Path(root)) as lab:
            for name in args.only or names:
                path = args.folder / f"{name}-{theme}.webp"
                if name == "heal":
                    take_film(lab, path)
                else:
                    take(lab, name, path)


if __name__ == "__main__":
    main()
