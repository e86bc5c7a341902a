"""Controllers to compare with: what an operator has today, and what others have proposed.

``registry`` lists them by name; each has a file of its own. To add one, write a function that takes
a :class:`training.baselines.task.Task` and returns a controller, and name it on the command line:
``python -m training.compare --controller my_module:make``.
"""
