"""A process forked at any moment can drop, ask and leave what it inherited, and never hangs.

The threads of the store do not come along, so any lock that one of them holds at that moment is
held for ever in the child.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from children import forked_python
from support import shared_out

STORM = """
import os, random, signal, sys, threading, warnings
warnings.simplefilter("ignore")
from pathlib import Path
import torch
from support import Rig
import ssdtrain
from ssdtrain.errors import ClosedError
torch.set_num_threads(1)
store = ssdtrain.TensorStore(sys.argv[1], backend=sys.argv[2], direct_io="optional")
source = torch.randn(16384)
stored = [store.write(source) for _ in range(32)]
rig = Rig(Path(sys.argv[1]), backend=sys.argv[2])
leave = threading.Event()
def use_the_store():
    while not leave.is_set():
        # Given up at once: workers drop the slots of the reads and give the sources back.
        del [store.read(one) for one in stored][:]
        del [store.write(torch.randn(16384)) for _ in range(32)][:]
threads = [threading.Thread(target=use_the_store) for _ in range(2)]
for thread in threads:
    thread.start()
chance = random.Random(0)
hung = 0
for _ in range(int(sys.argv[3])):
    slots = [store.read(one).result() for one in stored[:4]]
    with rig.context():
        loss = sum((torch.randn(16384, requires_grad=True) * 2).sin().sum() for _ in range(8))
    rig.begin_writes()
    for _ in range(chance.randrange(20_000)):  # another moment of the threads each time
        pass
    child = os.fork()
    if not child:
        signal.alarm(10)
        del slots, stored, loss
        try:
            store.stats()
        except ClosedError:
            refused = True
        rig.stats
        rig.session.close()
        store.close()
        os._exit(0 if refused else 1)
    _, status = os.waitpid(child, 0)
    hung += status != 0
    loss.backward()
leave.set()
for thread in threads:
    thread.join()
print("children that hung or failed:", hung)
"""


@pytest.mark.parametrize(
    ("backend", "forks"),
    shared_out([("psync", 60), ("io_uring", 60), ("io_uring", 15)], quick=[("io_uring", 15)]),
)
def test_children_forked_while_workers_are_busy(backend: str, forks: int, tmp_path: Path) -> None:
    done = forked_python(STORM, str(tmp_path), backend, str(forks))
    assert (done.stdout, done.returncode) == ("children that hung or failed: 0\n", 0), done.stderr
