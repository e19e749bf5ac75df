"""The lab example: a Flower app with models in datagrams on the embedded digits, and the processes that run it (extras:
flower, net)."""

from importlib.util import find_spec

from safari.errors import MissingExtraError

for _library in ("flwr", "cryptography", "raptorq", "httpx", "starlette", "uvicorn"):
    if find_spec(_library) is None:
        raise MissingExtraError(_library, "flower,net", "'safari net' and its gate")
