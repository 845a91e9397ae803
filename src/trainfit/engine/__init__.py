"""The training loop: any TrainTask, step by step, on one process or several, and it does not die.

    run = run_folder.create("runs", "nli", config=…, plan=…)
    result = loop.train(task, LoopSettings(…), run)             # again with resume=True
    checkpoint.load_weights(run, task.build_model(), best=True)

`step` computes, `recovery` survives running out of memory, `checkpoint` survives everything else,
and `loop` puts them in order.
"""
