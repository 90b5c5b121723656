"""Take the pictures of README and docs, light and dark, from real cells.

    python tools/take_pictures.py [FOLDER]

FOLDER is ``notebooks/pictures`` by default. Needs Chromium; takes about five minutes.
"""

from __future__ import annotations

import io
import itertools
import os
import re
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))

from browser import lab as front_end  # noqa: E402
from browser.lab import write_notebook  # noqa: E402

THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
SCALE = 1.4  # device pixels for a pixel of the page
COLORS = 256  # a third of the bytes without a visible difference
START = "%load_ext nbddp\n%ddp start --nproc 4 --name digits"
TRAIN = """%%ddp
batches = nbddp.loader(nbddp.digits().train, batch_size=16)
layers = torch.nn.Flatten(), torch.nn.Linear(784, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
model = nbddp.prepare(torch.nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=0.03)
step = 0
for epoch in range(40):
    for images, labels in nbddp.track(batches, label=f"epoch {epoch}"):
        output = model(images)
        loss = torch.nn.functional.cross_entropy(output, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right = (output.argmax(1) == labels).float().mean()
        nbddp.log(step=step, loss=loss.item(), accuracy=right.item())
        step += 1
    print(f"epoch {epoch}: loss {loss.item():.3f}")
"""


# the animation: a rank is killed while the cell runs, and the cell heals
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
VIEWPORT = {"width": 900, "height": 1300}  # large enough that nothing scrolls
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
QUALITY = 55  # below half a megabyte, with sharp letters
TOGGLE = "application:toggle-left-area"
NO_POINTER = "document.querySelector('#pointer')?.remove()"


SMALL = """%%ddp
def train(lr, steps=200):
    torch.manual_seed(0)
    model = nbddp.prepare(torch.nn.Linear(784, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    images, labels = nbddp.digits().train.tensors
    for step in range(steps):
        some = torch.randint(len(images), (32,))
        loss = torch.nn.functional.cross_entropy(model(images[some].flatten(1)), labels[some])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        nbddp.log(step=step, loss=loss.item())
"""
SCRIPT = """import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1)
for step in range(2000):
    dist.all_reduce(x)
    x /= dist.get_world_size()
    time.sleep(0.01)
    if step % 100 == 0:
        print("step", step, "on rank", os.environ["RANK"], flush=True)
"""
FAIL = """%%ddp
def weight(loss):
    return loss / (2 - rank)


total = torch.tensor(weight(1.0))
dist.all_reduce(total)"""
HANG = """%%ddp
import time

x = torch.ones(1000)
if rank == 2:
    time.sleep(60)  # a slow file system, for example
dist.all_reduce(x)"""
STRAGGLER = """%%ddp --timeline
import time

x = torch.ones(1000)
for step in range(40):
    time.sleep(0.02 if rank == 3 else 0.01)
    dist.all_reduce(x)
    nbddp.log(step=step)"""
DEBUG = """%%ddp
numbers = torch.arange(4.0) - rank
if rank == 2:
    breakpoint()
numbers.log().sum()"""
# By picture: the cells, and a text below the last cell. The picture shows the last cell.
SCENES = {
    "failure": ([FAIL], "Every rank keeps its variables"),
    "hang": ([HANG], "no progress for"),
    "sweep": (
        [SMALL, "%%ddp --sweep lr=0.3,0.1,0.01\ntrain(lr)"],
        "the code of all cells is the same",
    ),
    "timeline": ([STRAGGLER], "waited for"),
    "debugger": ([DEBUG], "ipdb>"),
    "script": (["%ddp run train.py"], "step 300"),
}


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


def take_moving(theme: str, folder: Path) -> None:
    """Record a cell that trains, loses a rank to the Kill button, and heals."""
    os.environ["LAB_THEME"] = THEMES[theme]
    with tempfile.TemporaryDirectory() as root, front_end.Lab(Path(root)) as lab:
        write_notebook(lab.notebooks / "heal.ipynb", START, PREPARE, HEAL)
        with lab.open("heal.ipynb") as notebook:
            notebook.page.set_viewport_size(VIEWPORT)
            notebook.js(f"await window.jupyterapp.commands.execute('{TOGGLE}')")
            notebook.run(0)
            notebook.run(1)
            notebook.code_cell(2).locator(".cm-content").click()
            film = Film(notebook, 2)
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
            film.save(folder / f"heal-{theme}.webp")


def take(theme: str, folder: Path) -> None:
    """Take one screenshot in the middle of the training."""
    os.environ["LAB_THEME"] = THEMES[theme]
    with tempfile.TemporaryDirectory() as root, front_end.Lab(Path(root)) as lab:
        write_notebook(lab.notebooks / "digits.ipynb", START, TRAIN)
        with lab.open("digits.ipynb", scale=SCALE) as notebook:
            notebook.run(0)
            notebook.begin(1)
            notebook.await_text(1, r"epoch 10: loss", timeout=120)
            panel = notebook.code_cell(1).locator(".nbddp-panel")
            panel.scroll_into_view_if_needed()
            panel.screenshot(path=folder / f"panel-{theme}.png")
    reduce_colors(folder / f"panel-{theme}.png")


def take_scenes(theme: str, folder: Path) -> None:
    """Take a screenshot of the last cell of each scene."""
    os.environ["LAB_THEME"] = THEMES[theme]
    with tempfile.TemporaryDirectory() as root, front_end.Lab(Path(root)) as lab:
        (lab.notebooks / "train.py").write_text(SCRIPT)
        for name, (cells, pattern) in SCENES.items():
            write_notebook(lab.notebooks / f"{name}.ipynb", START, *cells)
            with lab.open(f"{name}.ipynb", scale=SCALE) as notebook:
                for cell in range(len(cells)):
                    notebook.run(cell)
                notebook.begin(len(cells))
                notebook.await_text(len(cells), pattern, timeout=120)
                shown = notebook.code_cell(len(cells))
                shown.scroll_into_view_if_needed()
                path = folder / f"{name}-{theme}.png"
                shown.screenshot(path=path)
                reduce_colors(path)


def reduce_colors(path: Path) -> None:
    with Image.open(path) as picture:
        few = picture.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


if __name__ == "__main__":
    where = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "notebooks" / "pictures"
    for each in THEMES:
        take(each, where)
        take_moving(each, where)
        take_scenes(each, where)
