# The service, and with `--target train` the training client.
#
# Behind a package mirror, give pip's configuration as a build secret; it stays out of the image:
#   docker build --secret id=pip,src=/etc/pip.conf .
#
# `make release` sets VERSION and REVISION, and notes the digest.

FROM python:3.11-slim-bookworm AS base
RUN useradd --uid 10001 --create-home --home-dir /data accountant \
    && install --directory --owner accountant /keys
ENV PATH=/opt/accountant/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1

FROM base AS build
WORKDIR /source
# uv has an environment of its own, so it is not in the image of the service. Modules are compiled
# here: a container cannot write them, and would compile them at every start
RUN python3 -m venv /opt/accountant && python3 -m venv /opt/uv
COPY pyproject.toml constraints.txt README.md LICENSE scripts/install.py ./
COPY scripts/package_metadata.py scripts/
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    /opt/uv/bin/pip install --no-cache-dir --constraint constraints.txt uv
COPY accountant_service accountant_service
COPY command_words command_words
COPY training_client training_client
RUN --mount=type=secret,id=pip,target=/etc/pip.conf /opt/uv/bin/python3 install.py \
    /opt/accountant --no-cache --compile-bytecode \
    --constraint constraints.txt '.[postgres,otel,report]'

FROM build AS train
RUN --mount=type=secret,id=pip,target=/etc/pip.conf /opt/uv/bin/python3 install.py \
    /opt/accountant --no-cache --compile-bytecode --constraint constraints.txt '.[train]'
USER accountant
WORKDIR /data
ENTRYPOINT ["accountant-train"]
CMD ["run"]

FROM base AS service
# for reports as PDF: WeasyPrint draws with Pango, in a font with Greek letters
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
    libpango-1.0-0 libpangoft2-1.0-0 libharfbuzz-subset0 fonts-dejavu-core \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/accountant /opt/accountant
USER accountant
WORKDIR /data
ENV ACCOUNTANT_DATABASE_URL=sqlite:////data/accountant.db ACCOUNTANT_LOG_LEVEL=info
VOLUME /data
EXPOSE 8000
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s --retries=3 CMD ["python3", "-c", \
    "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/readyz', timeout=4)"]
CMD ["accountant", "serve", "--host", "0.0.0.0"]
ARG VERSION=unknown REVISION=unknown
LABEL org.opencontainers.image.title="Privacy accountant" \
    org.opencontainers.image.description="Privacy accounting for differentially private training" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="$VERSION" \
    org.opencontainers.image.revision="$REVISION"
