"""Your own loop, on any number of processes: `paceline run -n 2 examples/own_loop.py`.

The loop does not know how many processes run it, nor how they share the work. It has a run folder, saves,
can be resumed, and Ctrl-C saves the step.
"""

import torch
from own_model import build
from torch.nn import functional as F

import paceline

recipe = paceline.Recipe(steps=120, batch={"size": 64}, optimizer={"lr": 1e-2})

with paceline.own_loop(recipe, build) as loop:
    scheduler = loop.schedule(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 40, gamma=0.5))
    for x, y in loop.batches():
        total = F.cross_entropy(loop.model(x), y, reduction="sum")
        loop.backward(paceline.Loss(total, len(y)))
        update = loop.step()  # None while more micro-batches of this step come
        if update is None:
            continue
        scheduler.step()
        step = loop.session.state.step + 1
        if step % 40 == 0:
            found = loop.evaluate()  # now, and not at an interval
            if loop.session.is_first:
                print(f"step {step}  rate {update.lr:g}  held out: accuracy {found.metrics['accuracy']:.3f}")

if loop.session.is_first:
    print(f"{loop.result.steps} steps, {loop.result.checkpoint}")
