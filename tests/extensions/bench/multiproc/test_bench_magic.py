"""``%ddp bench`` with real ranks."""

from notebook import Notebook

SHARES_KERNEL = True


def test_bench_measures_the_ranks_and_an_interrupt_ends_it(notebook: Notebook) -> None:
    notebook.run("%ddp restart --nproc 2\n%ddp view text")
    reply = notebook.run("%ddp bench --sizes 1K,100")
    [shown] = reply.displays
    assert set(shown) == {"image/png", "text/plain"}
    title, head, *rows = shown["text/plain"].splitlines()
    assert title == "collectives over gloo · 2 ranks"
    names = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "memcpy"]
    assert head.split() == ["size", *names]
    assert [row[:9].strip() for row in rows[:2]] == ["104 bytes", "1.0 KiB"]
    stopped = notebook.run_and_stop("%ddp bench --sizes 1K,2K,3K,4K,5K,6K,7K,8K", 1.0)
    assert "CellInterruptedError" in stopped.error
    reply = notebook.run("%%ddp\nx = torch.ones(2)\ndist.all_reduce(x)\nx[0].item()")
    assert "2.0" in reply.result + reply.text
