"""Make README's pictures of the panel anew, in light and dark, from a real training.

    python tests/browser/take_pictures.py [FOLDER]

FOLDER is ``notebooks/pictures`` if it is not said. Needs Chromium; takes about a minute.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))

from browser import lab as front_end  # noqa: E402
from browser.conftest import write_notebook  # noqa: E402

THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
SCALE = 1.4  # dots for a pixel of the page
COLORS = 256  # a third of the bytes, and nobody sees it
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


def take(theme: str, folder: Path) -> None:
    """One picture, in the middle of the training."""
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
    with Image.open(folder / f"panel-{theme}.png") as picture:
        few = picture.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE)
    few.save(folder / f"panel-{theme}.png", optimize=True)


if __name__ == "__main__":
    where = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "notebooks" / "pictures"
    for each in THEMES:
        take(each, where)
