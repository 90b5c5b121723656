"""Source code of long work that is no hang, for a rank that other ranks wait for."""

SETUP = """import hashlib, os, socket, subprocess, sys, threading, time
other = dist.new_group()
def turns_in(seconds, compute, turns):
    began = time.monotonic()
    compute(turns)
    return int(turns * seconds / (time.monotonic() - began))
def derive(turns): hashlib.pbkdf2_hmac("sha256", b"x", b"y", turns)
def grind(seconds): derive(turns_in(seconds, derive, 300_000))
def add_up(turns): sum(range(turns))
"""
LOOP = "for i in 0 1 2 3 4 5 6 7 8 9; do sleep {pause}; echo $i; done"
COMPILES = """import tempfile
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(dir=".")
layers = [torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.LayerNorm(64)] * 4
torch.compile(torch.nn.Sequential(*layers))(torch.ones(8, 64)).sum().backward()
"""
THREAD_PRINTS = """def say():
    while time.monotonic() < end: print("."); time.sleep(.5)
it = threading.Thread(target=say)
it.start()
it.join()
"""
CHECKPOINT = """x = torch.ones(10_000_000)
while time.monotonic() < end:
    with open("big.pt", "wb") as f:
        torch.save(x, f)
        os.fsync(f.fileno())
"""
SLOW_PIPE = """def drain(read):
    with open(read, "rb", buffering=0) as pipe:
        while pipe.read(1 << 16): time.sleep(0.01)  # about 6 MB a second
read, write = os.pipe()
reader = threading.Thread(target=drain, args=(read,))
reader.start()
with open(write, "wb") as slow:
    torch.save({{"weights": torch.ones({floats})}}, slow)
reader.join()
"""
SLOW_SOCKET = """left, right = socket.socketpair()
def feed():
    while time.monotonic() < end: left.send(b"."); time.sleep(.7)
    left.close()
threading.Thread(target=feed).start()
while time.monotonic() < end: right.recv(9)
"""
FED_QUEUE = """import multiprocessing, queue
context = multiprocessing.get_context("fork")
items = context.Queue()
def feed():
    while time.monotonic() < end: items.put(1); time.sleep(.5)
feeder = context.Process(target=feed)
feeder.start()
while time.monotonic() < end:
    try: items.get(timeout=.3)
    except queue.Empty: pass
feeder.join()
"""
LOADS = """class Slow(torch.utils.data.Dataset):
    def __len__(self): return 2
    def __getitem__(self, i):
        end = time.monotonic() + 8
        while time.monotonic() < end: sum(range(1000))
        return i
list(torch.utils.data.DataLoader(Slow(), num_workers=1))
"""


def works(seconds: float) -> dict[str, str]:
    """Return pieces of work that each take about so many seconds; ``end`` is when they end."""
    loop = LOOP.format(pause=seconds / 10)  # shorter than the second between two samples of a rank
    computes = f"import time\nwhile time.process_time() < {seconds / 2}: pass"
    child = f"subprocess.run([sys.executable, '-c', {computes!r}], timeout=900, check=True)"
    meet = "dist.all_reduce(torch.ones(1), group=other, async_op=True)"
    return {
        "short sleeps": "while time.monotonic() < end: time.sleep(.7)",
        "one call of C": f"grind({seconds})",
        "a thread": f"it = threading.Thread(target=grind, args=[{seconds}])\nit.start()\nit.join()",
        "a child": child,
        "a child beside a collective": f"{meet}\n{child}",
        "a thread that prints": THREAD_PRINTS,
        "a checkpoint": CHECKPOINT,
        "a socket": SLOW_SOCKET,
        "a slow pipe": SLOW_PIPE.format(floats=int(seconds * 1.4e6)),
        "a command that prints": f"!{loop}",
        "a shell that prints into a pipe": (
            f"subprocess.run({loop!r}, shell=True, capture_output=True, timeout=900)"
        ),
        "Python's lock": f"add_up(turns_in({seconds}, add_up, 20_000_000))",
        "torch.compile": COMPILES,
        "a queue that a process feeds": FED_QUEUE,
        "a loader": LOADS,
    }


def waits_for(work: str, seconds: float) -> str:
    body = "\n".join(f"    {line}" for line in work.splitlines())
    return f"{SETUP}end = time.monotonic() + {seconds}\nif rank == 0:\n{body}\ndist.barrier()"
