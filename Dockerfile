# Images of the daemon: docker build --target cpu -t dalsegno:cpu .   and   docker build --target cuda -t dalsegno:cuda .
# How to run them, and what to mount: deploy/README.md.

ARG PYTHON_IMAGE=python:3.11.14-slim-trixie
# The toolkit, not only the runtime: flashinfer compiles its kernels for the GPU that it finds, at their first use. Its
# release is that of the CUDA which PyPI's torch is built for.
ARG CUDA_IMAGE=nvidia/cuda:13.0.2-devel-ubuntu24.04


# The wheel, and what it needs: apart, so that a change of the code leaves the layers with torch as they are.
FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /src
COPY pyproject.toml constraints.txt ./
RUN mkdir /requirements \
    && python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; print(*project["dependencies"], sep="\n")' > /requirements/base.txt \
    && python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; print(*project["optional-dependencies"]["cuda"], sep="\n")' > /requirements/cuda.txt \
    && cp constraints.txt /requirements
COPY README.md LICENSE ./
COPY bench bench
COPY cache cache
COPY engine engine
COPY ops ops
COPY server server
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .


FROM ${PYTHON_IMAGE} AS cpu
# PyPI's torch is the build for CUDA. With --build-arg TORCH_INDEX=URL of PyTorch's index of CPU builds the image is far
# smaller; what torch needs comes from PyPI in the step after it.
ARG TORCH_INDEX=
RUN useradd --uid 10001 --create-home dalsegno \
    && mkdir /home/dalsegno/.cache /models \
    && chown dalsegno: /home/dalsegno/.cache \
    && python -m venv /opt/dalsegno
ENV PATH=/opt/dalsegno/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    DALSEGNO_SERVER_HOST=0.0.0.0
COPY --from=wheel /requirements /requirements
RUN pip install --no-cache-dir --no-deps --constraint /requirements/constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
RUN pip install --no-cache-dir --constraint /requirements/constraints.txt --requirement /requirements/base.txt
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels pip install --no-cache-dir --no-deps /wheels/*.whl
USER 10001
WORKDIR /home/dalsegno
VOLUME /home/dalsegno/.cache
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 CMD ["python", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:%s/readyz' % os.environ.get('DALSEGNO_SERVER_PORT', '8000'), timeout=4)"]
ENTRYPOINT ["dalsegno"]
CMD ["serve"]


# hadolint ignore=DL3006
FROM ${CUDA_IMAGE} AS cuda
# A compiler and Python's headers too: Triton compiles its launchers with them.
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends g++ python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home dalsegno \
    && mkdir /home/dalsegno/.cache /models \
    && chown dalsegno: /home/dalsegno/.cache \
    && python3 -m venv /opt/dalsegno
# Everything that is compiled or fetched later goes below .cache, one volume: flashinfer's kernels lie there anyway.
ENV PATH=/opt/dalsegno/bin:$PATH \
    CUDA_HOME=/usr/local/cuda \
    CUDA_CACHE_PATH=/home/dalsegno/.cache/cuda \
    TRITON_CACHE_DIR=/home/dalsegno/.cache/triton \
    PYTHONUNBUFFERED=1 \
    DALSEGNO_SERVER_HOST=0.0.0.0
COPY --from=wheel /requirements /requirements
RUN pip install --no-cache-dir --constraint /requirements/constraints.txt torch
RUN pip install --no-cache-dir --constraint /requirements/constraints.txt --requirement /requirements/cuda.txt
RUN pip install --no-cache-dir --constraint /requirements/constraints.txt --requirement /requirements/base.txt
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels pip install --no-cache-dir --no-deps /wheels/*.whl
USER 10001
WORKDIR /home/dalsegno
VOLUME /home/dalsegno/.cache
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 CMD ["python", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:%s/readyz' % os.environ.get('DALSEGNO_SERVER_PORT', '8000'), timeout=4)"]
ENTRYPOINT ["dalsegno"]
CMD ["serve"]
