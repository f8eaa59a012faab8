# syntax=docker/dockerfile:1
# Paceline with pinned dependencies, for a user that is not root.
#   docker build -t paceline:cpu .
#   docker build -t paceline:cuda --build-arg TORCH_INDEX=URL-OF-CUDA-WHEELS .
# TORCH_INDEX: where PyTorch publishes the wheels of a variant; empty: the variant of the default index.
# Pin the base image by its digest in your own registry: --build-arg BASE=python:3.11-slim-bookworm@sha256:...
ARG BASE=python:3.11.9-slim-bookworm

FROM ${BASE} AS build
ARG TORCH_INDEX=
ARG TORCH=2.13.0
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/paceline
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src
RUN /opt/paceline/bin/pip install ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} "torch==${TORCH}" \
    && /opt/paceline/bin/pip install -c constraints.txt ".[serve,prometheus,s3]"

FROM ${BASE}
# gcc compiles the codecs of this machine at their first use; the CUDA libraries come with torch's wheels
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home paceline
COPY --from=build /opt/paceline /opt/paceline
ENV PATH=/opt/paceline/bin:$PATH PYTHONUNBUFFERED=1
USER 1000:1000
WORKDIR /home/paceline
CMD ["paceline", "--help"]
