"""Controllers to compare with: what an operator has today, and what others have proposed.

``registry`` lists them by name; each has a file of its own. To add one, write a function that takes
a :class:`training.baselines.task.Task` and returns a controller, in a file anywhere on PYTHONPATH::

    # my_rules.py
    import numpy as np

    from training.baselines.stepwise import Stepwise


    class FewRows(Stepwise):
        def __init__(self, rows):
            self.rows = rows
            self.name = f"deepest up to {rows} rows"

        def start(self, simulator):  # what it remembers, for all servers
            return None

        def choose(self, simulator, memory, actions):  # fills (num_servers,) tiers
            few = simulator.state.server.num_running <= self.rows
            actions[:] = np.where(few, simulator.num_tiers - 1, 0)


    def make(task):
        return task.best(FewRows(rows) for rows in (4, 16, 64))

and name it::

    python -m training.compare CHECKPOINT --suite smoke --controller my_rules:make

It is then tuned on each system's tuning part and run on the same cells and seeds as all others.
What it may read is in ``stepwise``; ``feedback`` has the accept results, each when a server would
know it.
"""
