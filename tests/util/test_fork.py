"""A process that is forked after hopline has worked: refused, where torch would wait for threads that are gone."""

from __future__ import annotations

import os

import pytest

from tests.support.warm import run_python

PROGRAM = """
import os, sys, torch
import hopline as hl
from tests.support.runs import method, sage, small

def outcome(work):
    try:
        work()
    except ValueError as error:
        return str(error)
    return "done"

torch.set_num_threads(2)
data = small()
model = sage(data)
trainer = hl.Trainer(model, data, method(), epochs=1, show=False)
loader = method().loader(data)
trainer.fit()
works = {
    "Trainer": lambda: hl.Trainer(model, data, method(), show=False),
    "fit": lambda: trainer.fit(),
    "loader": lambda: [batch for batch in loader],
    "inference": lambda: hl.infer.exact(model, data),
}
sys.stdout.flush()
child = os.fork()
if child == 0:
    for name, work in works.items():
        print(name, outcome(work))
    torch.set_num_threads(1)
    for name, work in works.items():
        print(name, outcome(work))
    sys.stdout.flush()
    os._exit(0)
os.waitpid(child, 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_process_is_refused_unless_torch_has_one_thread_in_it():
    ended = run_python("-c", PROGRAM, timeout=60)
    lines = ended.stdout.splitlines()
    names = ["Trainer", "fit", "loader", "inference"]
    assert [line.split()[0] for line in lines] == names * 2, ended
    for line in lines[:4]:
        assert "forked after hopline had worked" in line
        assert "multiprocessing.get_context('spawn')" in line
        assert "torch.set_num_threads(1)" in line
    assert [line.split(maxsplit=1)[1] for line in lines[4:]] == ["done"] * 4
