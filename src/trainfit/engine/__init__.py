"""The training loop: trains any TrainTask on one process or several, and recovers from failures.

    run = run_folder.create("runs", "nli", config=…, plan=…)
    result = loop.train(task, LoopSettings(…), run)             # again with resume=True
    checkpoint.load_weights(run, task.build_model(), best=True)

`step` computes, `recovery` handles memory that runs out, `checkpoint` all other interruptions,
and `loop` puts them in order.
"""
