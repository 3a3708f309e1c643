"""`python -m moe_runtime.gateway --node NAME --controller ENDPOINT`: started by the launcher, not by people."""

import argparse
import logging
import sys

import uvloop

from moe_runtime.gateway.node import GatewayNode


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m moe_runtime.gateway", description=__doc__)
    parser.add_argument("--node", required=True, help="this process's name in the cluster")
    parser.add_argument("--controller", required=True, help="the controller's ZeroMQ endpoint, tcp://HOST:PORT")
    arguments = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    return uvloop.run(_serve(arguments.node, arguments.controller))


async def _serve(node: str, controller: str) -> int:
    return await GatewayNode(node, controller).run()


if __name__ == "__main__":
    sys.exit(main())
