"""Your own loop around the same step: `paceline run -n 2 examples/own_loop.py`.

The script does not know how many processes run it, nor how they share the work.
"""

from own_model import build

import paceline

recipe = paceline.Recipe(steps=120, batch={"size": 64}, optimizer={"lr": 1e-2})

with paceline.join(recipe, build) as session:
    for stats in session.rounds():
        if session.is_first and stats.step % 40 == 39:
            print(f"step {stats.step + 1}  loss {stats.loss:.4f}  accuracy {stats.metrics['accuracy']:.3f}")
    found = paceline.evaluate(session)
    samples = session.sum(sum(len(micro_batch.indices) for micro_batch in session.work.micro_batches(0)))
    if session.is_first:
        print(f"held out: accuracy {found.metrics['accuracy']:.3f}; {samples:.0f} samples a step")
