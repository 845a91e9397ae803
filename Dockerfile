# trainfit with torch's CUDA build, which brings CUDA itself: the host needs only NVIDIA's driver
# and its container toolkit.
#   docker build -t trainfit .
#   docker run --gpus all --ipc=host -v "$PWD:/work" trainfit train textclass data.train=train.csv
FROM python:3.12-slim

# torch.compile and Triton build with a C compiler and the headers of Python, which this image has.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc g++ \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/trainfit
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir -c constraints.txt '.[hpo]'

WORKDIR /work
ENTRYPOINT ["trainfit"]
CMD ["check"]
