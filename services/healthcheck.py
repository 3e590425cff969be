"""`python -m services.healthcheck TARGET [SERVICE]`: whether a service is well, as an exit status.

For container health checks, which have no curl or grpcurl at hand. TARGET is an `http://` URL that
must answer 200, or a gRPC address whose grpc.health.v1 must say SERVING for SERVICE (full name;
unset: the process as a whole).
"""

import argparse
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Final

DEFAULT_TIMEOUT_S: Final = 3.0


def check(target: str, service: str, timeout_s: float) -> str | None:
    """Returns None when the target is well, else what is wrong, in one line."""
    if target.startswith("http://"):
        return _check_http(target, timeout_s)
    return _check_grpc(target, service, timeout_s)


def _check_http(url: str, timeout_s: float) -> str | None:
    # a proxy of the environment is meant for the world outside, not for this machine
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout_s):
            return None
    except urllib.error.HTTPError as error:
        return f"{url} answers {error.code}"
    except OSError as error:
        return f"{url} does not answer: {error}"


def _check_grpc(address: str, service: str, timeout_s: float) -> str | None:
    # imported here: an HTTP check every few seconds should not pay for loading grpc
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from services.channel import CLIENT_OPTIONS

    shown = service or "the process"
    with grpc.insecure_channel(address, options=CLIENT_OPTIONS) as channel:
        stub = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            status = stub.Check(request, timeout=timeout_s, wait_for_ready=True).status
        except grpc.RpcError as error:
            return f"{address} does not answer for {shown}: {error.code().name}"
    if status == health_pb2.HealthCheckResponse.SERVING:
        return None
    return f"{address}: {shown} is {health_pb2.HealthCheckResponse.ServingStatus.Name(status)}"


def main(argv: Sequence[str]) -> int:
    """Checks once. Returns the exit status: 0 well, 1 not."""
    parser = argparse.ArgumentParser(prog="python -m services.healthcheck", allow_abbrev=False)
    parser.add_argument("target", help="http://host:port/path, host:port or unix:/path")
    parser.add_argument("service", nargs="?", default="", help="full name of a gRPC service")
    parser.add_argument("--timeout-s", type=float, default=DEFAULT_TIMEOUT_S, metavar="SECONDS")
    args = parser.parse_args(argv)
    fault = check(args.target, args.service, args.timeout_s)
    if fault is not None:
        sys.stderr.write(f"{fault}\n")
    return 0 if fault is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
