"""`python -m moe_runtime.gateway --node NAME --controller ENDPOINT`: started by the launcher, not by people."""

import argparse
import logging
import sys

import uvloop

from moe_runtime.gateway.node import GatewayNode
from moe_runtime.gateway.request_ids import RequestIdFilter


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m moe_runtime.gateway", description=__doc__)
    parser.add_argument("--node", required=True, help="this process's name in the cluster")
    parser.add_argument("--controller", required=True, help="the controller's ZeroMQ endpoint, tcp://HOST:PORT")
    arguments = parser.parse_args()
    _log_to_stderr()
    return uvloop.run(_serve(arguments.node, arguments.controller))


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(RequestIdFilter())
    layout = "%(asctime)s %(name)s [%(request_id)s]: %(message)s"
    logging.basicConfig(handlers=[handler], level=logging.WARNING, format=layout)


async def _serve(node: str, controller: str) -> int:
    return await GatewayNode(node, controller).run()


if __name__ == "__main__":
    sys.exit(main())
