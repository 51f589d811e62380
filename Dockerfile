# A server for the model in /model, on CPUs: docs/serving.md.
FROM python:3.12-slim

# torch's builds for CPUs, without gigabytes of CUDA libraries.
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu PIP_NO_CACHE_DIR=1

WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE hf_vaswani_start.py ./
COPY hf_vaswani hf_vaswani
RUN pip install --constraint constraints.txt '.[serve,convert]'

RUN useradd --create-home translator
USER translator
WORKDIR /home/translator

EXPOSE 5000
HEALTHCHECK --start-period=120s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:5000/health', timeout=10)"]
ENTRYPOINT ["hf-vaswani", "serve", "--host", "0.0.0.0"]
CMD ["--model", "/model"]
