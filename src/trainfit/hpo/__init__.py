"""Hyperparameter search: trials over folds under one memory plan, by one worker or many.

The only package that imports Optuna. A study lives in a database (storage.py). A worker claims a
trial (desk.py), trains its folds (running.py) and tells what came of it; whoever dies leaves the
trial to the next. The way through a command: setting.py, studies.py, worker.py, final.py.
"""
