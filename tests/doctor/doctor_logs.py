"""Logs in the shape of real ones, written anew: twenty-odd that are ill, and some that are not.

Each ill one has a line of somebody's text in it, which must never be shown.
"""

from __future__ import annotations

SECRET = "zyxquabberword i cannot sleep"

TRACE = """\
2026-03-04 11:02:57 INFO example 17: {secret}
Traceback (most recent call last):
  File "train.py", line 212, in <module>
    main()
  File "train.py", line 158, in step
    loss.backward()
"""

ILL: dict[str, tuple[set[str], str]] = {
    "torch 1.13, out of memory, reserved far over allocated": (
        {"cuda_oom_fragmented"},
        "RuntimeError: CUDA out of memory. Tried to allocate 1.50 GiB (GPU 0; 23.69 GiB total "
        "capacity; 16.10 GiB already allocated; 812.00 MiB free; 21.40 GiB reserved in total by "
        "PyTorch) If reserved memory is >> allocated memory try setting max_split_size_mb to avoid "
        "fragmentation.  See documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF",
    ),
    "torch 2.0, plain": (
        {"cuda_oom"},
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB (GPU 0; "
        "10.76 GiB total capacity; 9.41 GiB already allocated; 210.44 MiB free; 9.62 GiB reserved "
        "in total by PyTorch)",
    ),
    "torch 2.1, its own misspelling and its own process by number": (
        {"cuda_oom"},
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a "
        "total capacty of 14.75 GiB of which 17.06 MiB is free. Process 27318 has 14.73 GiB memory "
        "in use. Of the allocated memory 14.35 GiB is allocated by PyTorch, and 256.90 MiB is "
        "reserved by PyTorch but unallocated. If reserved but unallocated memory is large try "
        "setting max_split_size_mb to avoid fragmentation.",
    ),
    "torch 2.4, much reserved but unallocated": (
        {"cuda_oom_fragmented"},
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.25 GiB. GPU 0 has a total "
        "capacity of 23.64 GiB of which 1.02 GiB is free. Including non-PyTorch memory, this "
        "process has 22.60 GiB memory in use. Of the allocated memory 18.90 GiB is allocated by "
        "PyTorch, and 3.10 GiB is reserved by PyTorch but unallocated. If reserved but unallocated "
        "memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid "
        "fragmentation.",
    ),
    "torch 2.6, a second process on the GPU": (
        {"cuda_oom_shared"},
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 128.00 MiB. GPU 1 has a "
        "total capacity of 79.15 GiB of which 84.25 MiB is free. Process 5142 has 61.30 GiB memory "
        "in use. Including non-PyTorch memory, this process has 17.75 GiB memory in use. Of the "
        "allocated memory 17.10 GiB is allocated by PyTorch, and 142.60 MiB is reserved by PyTorch "
        "but unallocated.",
    ),
    "torch 2.9, private pools": (
        {"cuda_oom"},
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 7.82 GiB. GPU 0 has a total "
        "capacity of 15.77 GiB of which 3.11 GiB is free. Including non-PyTorch memory, this "
        "process has 12.66 GiB memory in use. Of the allocated memory 12.20 GiB is allocated by "
        "PyTorch, with 64.00 MiB allocated in private pools (e.g., CUDA Graphs), and 81.50 MiB is "
        "reserved by PyTorch but unallocated. If reserved but unallocated memory is large try "
        "setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.",
    ),
    "no memory even for the context": (
        {"cuda_oom"},
        "RuntimeError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously "
        "reported at some other API call, so the stacktrace below might be incorrect.",
    ),
    "cuBLAS": (
        {"library_alloc_failed"},
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ),
    "NCCL's watchdog under torchrun": (
        {"nccl_timeout"},
        "[rank1]:[E304 11:40:12.512 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective "
        "operation timeout: WorkNCCL(SeqNum=8121, OpType=ALLREDUCE, NumelIn=7087872, "
        "NumelOut=7087872, Timeout(ms)=600000) ran for 600029 milliseconds before timing out.\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
    ),
    "NCCL's unhandled system error": (
        {"nccl_error"},
        "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/"
        "ProcessGroupNCCL.cpp:1970, unhandled system error (run with NCCL_DEBUG=INFO for details), "
        "NCCL version 2.20.5\nncclSystemError: System call (e.g. socket, malloc) or external "
        "library call failed or device error.",
    ),
    "two ranks on one GPU": (
        {"nccl_duplicate_gpu", "nccl_error"},
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1331\n"
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
        "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 3b000",
    ),
    "no GPU for NCCL": (
        {"no_gpu_found"},
        "ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!",
    ),
    "driver too old for the wheel": (
        {"driver_too_old"},
        "RuntimeError: The NVIDIA driver on your system is too old (found version 11040). Please "
        "update your GPU driver by downloading and installing a new version",
    ),
    "driver too old, as CUDA says it": (
        {"driver_too_old"},
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 35: CUDA driver version "
        "is insufficient for CUDA runtime version",
    ),
    "the card fell off the bus": (
        {"xid"},
        "[88213.402] NVRM: Xid (PCI:0000:65:00): 79, pid='<unknown>', name=<unknown>, GPU has "
        "fallen off the bus.",
    ),
    "shared memory of a container": (
        {"shm_full_log"},
        "RuntimeError: DataLoader worker (pid 4077) is killed by signal: Bus error. It is possible "
        "that dataloader's workers are out of shared memory. Please try to raise your shared "
        "memory limit.",
    ),
    "a worker killed": (
        {"loader_worker_killed"},
        "RuntimeError: DataLoader worker (pid 51123) is killed by signal: Killed.",
    ),
    "a worker that went away": (
        {"loader_worker_crashed"},
        "RuntimeError: DataLoader worker (pid(s) 812, 813) exited unexpectedly",
    ),
    "a bus error in a worker that then went away": (
        {"shm_full_log"},
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient "
        "shared memory (shm).\nRuntimeError: DataLoader worker (pid(s) 77) exited unexpectedly",
    ),
    "bf16 on an old GPU": (
        {"bf16_unsupported"},
        "ValueError: Your setup doesn't support bf16/gpu. You need Ampere+ GPU with cuda>=11.0",
    ),
    "half a file of weights": (
        {"safetensors_damaged"},
        "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge",
    ),
    "another number of classes": (
        {"size_mismatch"},
        "RuntimeError: Error(s) in loading state_dict for Model:\n\tsize mismatch for "
        "classifier.weight: copying a param with shape torch.Size([2, 768]) from checkpoint, the "
        "shape in current model is torch.Size([3, 768]).",
    ),
    "unused weights": (
        {"unused_parameters"},
        "RuntimeError: Expected to have finished reduction in the prior iteration before starting "
        "a new one. This error indicates that your module has parameters that were not used.",
    ),
    "two devices": (
        {"two_devices"},
        "RuntimeError: Expected all tensors to be on the same device, but found at least two "
        "devices, cuda:0 and cpu!",
    ),
    "two dtypes": ({"two_dtypes"}, "RuntimeError: expected scalar type Half but found Float"),
    "a text that is too long": ({"index_range"}, "IndexError: index out of range in self"),
    "a gated model": ({"gated_model"}, "OSError: You are trying to access a gated repo."),
    "no padding token": (
        {"no_pad_token"},
        "ValueError: Cannot handle batch sizes > 1 if no padding token is defined.",
    ),
    "a pickled checkpoint": (
        {"weights_only"},
        "_pickle.UnpicklingError: Weights only load failed. This file can still be loaded.",
    ),
    "an error that nobody knows": ({"python_error"}, "my.package.OddError: nobody knows"),
    "open files": (
        {"too_many_open_files"},
        "OSError: [Errno 24] Too many open files: '/tmp/pymp-4jz9w2x1'",
    ),
    "no compiler": (
        {"compiler_missing"},
        "torch._inductor.exc.InductorError: RuntimeError: Failed to find C compiler. Please "
        "specify via CC environment variable or set triton.knobs.build.impl.",
    ),
    "no headers": (
        {"headers_missing"},
        "/tmp/tmpbz1w/main.c:2:10: fatal error: Python.h: No such file or directory\n"
        "compilation terminated.\ntorch._dynamo.exc.BackendCompilerFailed: backend='inductor' "
        "raised:\nCalledProcessError: Command '['/usr/bin/gcc']' returned non-zero exit status 1.",
    ),
    "no Triton": (
        {"triton_missing"},
        "torch._inductor.exc.TritonMissing: Cannot find a working triton installation. Either the "
        "package is not installed or it is too old.",
    ),
    "a compiler that gave up": (
        {"compile_failed"},
        "torch._dynamo.exc.InternalTorchDynamoError: IndexError: list index out of range",
    ),
    "recompiled too often": (
        {"recompile_limit"},
        "W0304 torch/_dynamo/convert_frame.py:844] [0/8] torch._dynamo hit config.cache_size_limit "
        "(8)\nW0304 function: 'forward' (model.py:120)",
    ),
    "recompiled too often, newer": (
        {"recompile_limit"},
        "W0304 torch/_dynamo/convert_frame.py:906] [3/8] torch._dynamo hit config.recompile_limit "
        "(8)",
    ),
    "NaN in fp16 with transformers": (
        {"nan_loss"},
        "TrainingArguments(fp16=True, learning_rate=0.001)\n"
        "{'loss': 2.31, 'grad_norm': 8.2, 'learning_rate': 0.0009, 'epoch': 0.1}\n"
        "{'loss': nan, 'grad_norm': nan, 'learning_rate': 0.0008, 'epoch': 0.2}",
    ),
    "NaN in bf16": (
        {"nan_loss"},
        "amp_dtype: bf16\niter 100: loss 4.1200, time 251.20ms, mfu 22.1%\n"
        "iter 110: loss nan, time 250.90ms, mfu 22.1%",
    ),
    "fp16 at the end of its scale": (
        {"fp16_overflow"},
        "Exception: Current loss scale already at minimum - cannot decrease scale anymore. "
        "Exiting run.",
    ),
    "a label out of range": (
        {"device_assert"},
        "../aten/src/ATen/native/cuda/Loss.cu:250: nll_loss_forward_reduce_cuda_kernel_2d: block: "
        "[0,0,0], thread: [3,0,0] Assertion `t >= 0 && t < n_classes` failed.\n"
        "RuntimeError: CUDA error: device-side assert triggered",
    ),
    "an illegal access": (
        {"illegal_access"},
        "RuntimeError: CUDA error: an illegal memory access was encountered",
    ),
    "a GPU too new for the wheel": (
        {"no_kernel_image"},
        "NVIDIA GeForce RTX 5090 with CUDA capability sm_120 is not compatible with the current "
        "PyTorch installation.\nRuntimeError: CUDA error: no kernel image is available for "
        "execution on the device",
    ),
    "the container's memory": (
        {"host_oom"},
        "[91822.1] Memory cgroup out of memory: Killed process 8123 (python) total-vm:98210044kB",
    ),
    "killed in a shell": ({"host_oom"}, "run.sh: line 14:  2211 Killed                  python x"),
    "killed under torchrun": (
        {"host_oom"},
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n  rank      : 1\n"
        "  exitcode  : -9 (pid: 30125)\n  traceback : Signal 9 (SIGKILL) received by PID 30125",
    ),
    "a child and nothing else": (
        {"child_failed"},
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n  rank      : 0\n"
        "  exitcode  : 1 (pid: 30124)",
    ),
    "a port that is taken": (
        {"rendezvous"},
        "[W304 socket.cpp:697] The server socket has failed to listen on any local network "
        "address. useIpv6: 0, code: -98, name: EADDRINUSE, message: address already in use",
    ),
    "the guide's poor MFU": (
        {"low_mfu"},
        "iter 0: loss 10.4321, time 9000.00ms, mfu -100.0%\n"
        "iter 100: loss 8.5174, time 1011.21ms, mfu 1.6%",
    ),
    "the fused optimizer of an old torch": (
        {"fused_optimizer"},
        "ValueError: Optimizer not found: adamw_torch_fused",
    ),
    "TF32 off": (
        {"tf32_off"},
        "UserWarning: TensorFloat32 tensor cores for float32 matrix multiplication available but "
        "not enabled. Consider setting `torch.set_float32_matmul_precision('high')`",
    ),
    "flash attention before Ampere": (
        {"attention_kernel"},
        "RuntimeError: FlashAttention only supports Ampere GPUs or newer.",
    ),
    "too many workers": (
        {"too_many_workers"},
        "UserWarning: This DataLoader will create 16 worker processes in total. Our suggested max "
        "number of worker in current system is 4",
    ),
    "a full disk": (
        {"disk_full"},
        "OSError: [Errno 28] No space left on device",
    ),
    "trainfit's own ladder": (
        {"trainfit_oom"},
        "2026-11-15 06:19:02 oom at step 12: memory ran out: the cache was given back and the step "
        "is taken again\n2026-11-15 06:19:04 oom at step 12: memory ran out again: steps are cut "
        "into 8 from here",
    ),
}

HARMLESS: dict[str, str] = {
    "a configuration that speaks of oom": """\
training:
  oom_retry: true
  handle_oom: ladder
  on_cuda_out_of_memory: halve
  nan_check: false
  stop_if_loss_is_nan: true
""",
    "help that mentions errors": """\
INFO if you see "CUDA out of memory", lower the batch size
INFO training stops if loss is nan, or when loss is NaN twice
INFO see the docs about NCCL timeouts and DataLoader workers
""",
    "out of memory, spoken of": """\
INFO on_cuda_out_of_memory: halve; retry_on: CUDA out of memory errors
INFO a step that runs into CUDA out of memory is cut finer
INFO "CUDA out of memory" → reduce batch_size or max_length
    except torch.cuda.OutOfMemoryError:
    raise torch.OutOfMemoryError(reason) from None
def halve(error: torch.OutOfMemoryError) -> None:
INFO PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True avoids CUDA out of memory
INFO out_of_memory: CUDA out of memory is handled, MPS backend out of memory is not
""",
    "nan inside words": """\
INFO loading nanoGPT with the tokenizer of banana-7b
INFO dataset finance: 1,204 rows, loss nanoseconds per token 14
INFO Nan Goldin is in the test set; NaN values dropped: 0
{'eval_loss': 0.412, 'eval_auc': nan, 'eval_f1': 0.81}
""",
    "killed in another sense": """\
INFO Killed 3 stale workers of the earlier job
INFO job state: killed=0 finished=4
INFO the hero is Killed in chapter 3
INFO early stopping killed the run after 3 evaluations without a better f1
""",
    "a good GPT run": """\
iter 0: loss 10.4120, time 8211.55ms, mfu -100.0%
iter 100: loss 8.5174, time 1011.21ms, mfu 15.2%
iter 200: loss 6.9120, time 1009.10ms, mfu 15.9%
""",
    "a good transformers run": """\
{'loss': 0.6931, 'grad_norm': 1.92, 'learning_rate': 1.8e-05, 'epoch': 0.12}
{'loss': 0.4410, 'grad_norm': inf, 'learning_rate': 1.6e-05, 'epoch': 0.24}
{'train_runtime': 812.4, 'train_samples_per_second': 91.2, 'train_loss': 0.3120, 'epoch': 3.0}
""",
    "NCCL at work": """\
node1:2211:2211 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.4<0>
node1:2211:2211 [0] NCCL INFO NET/Plugin: No plugin found (libnccl-net.so), using internal
node1:2211:2290 [0] NCCL INFO comm 0x55d1 rank 0 nranks 2 cudaDev 0 busId 3b000 - Init COMPLETE
""",
    "compiling": """\
INFO torch.compile: 12 blocks, mode default, dynamic=False
I0304 torch/_dynamo/symbolic_convert.py] Step 1: torchdynamo start tracing forward
INFO compiled in 21.4 s; recompile_limit is 8, cache_size_limit is 8
""",
    "memory that suffices": """\
GPU Memory Usage:
  Current: 14.32 GB
  Peak: 18.67 GB
  Total: 24.00 GB
  Utilization: 77.8%
INFO reserved but unallocated: 0.2 GiB; out of memory retries: 0
""",
    "trainfit's own lines": """\
2026-11-15 06:19:00 Device cpu, fp32, TF32 off
2026-11-15 06:19:01 step 10/40: loss 0.6931, lr 2.00e-05, norm 1.210, 91.2 samples/s
2026-11-15 06:19:02 evaluation at step 20: f1 0.4210, loss 0.5512
2026-11-15 06:19:04 finished after 40 steps
""",
    "a driver that is fine": """\
| NVIDIA-SMI 580.65.06    Driver Version: 580.65.06    CUDA Version: 13.0 |
|   0  NVIDIA H200        On  |   00000000:3B:00.0 Off |                  0 |
INFO driver 580.65.06 is new enough; Xid errors in dmesg: none
""",
    "an empty log": "",
}


def ill(text: str) -> str:
    """The excerpt inside the log around it."""
    return TRACE.format(secret=SECRET) + text + f"\n{SECRET}\n"
