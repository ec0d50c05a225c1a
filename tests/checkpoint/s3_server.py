"""A local server that speaks the S3 protocol, and Stores on it."""

import contextlib
import logging
import os
import urllib.request
from unittest import mock

from moto.server import ThreadedMotoServer

from fmegatron.checkpoint.files.stores import open_store


@contextlib.contextmanager
def s3_endpoint():
    """The endpoint of a server that holds the empty bucket "ckpt"; credentials for it are in the environment."""
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # a line for every request otherwise
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    try:
        with mock.patch.dict(os.environ, AWS_ACCESS_KEY_ID="x", AWS_SECRET_ACCESS_KEY="y"):
            urllib.request.urlopen(urllib.request.Request(f"{endpoint}/ckpt", method="PUT"), timeout=600).read()
            yield endpoint
    finally:
        server.stop()


def s3_store(endpoint, name):
    """The Store s3://ckpt/NAME of such a server."""
    options = {"endpoint": endpoint, "aws_region": "us-east-1", "aws_credentials": {"type": "environment"}}
    return open_store(f"s3://ckpt/{name}", options)
