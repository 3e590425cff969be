import http.server
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.healthcheck import main

SERVICE = "seamline.worker.v1.WorkerService"
STATUS = health_pb2.HealthCheckResponse


@contextmanager
def http_server(status: int) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/ready"
        server.shutdown()
        thread.join()


@pytest.fixture
def grpc_address(tmp_path: Path) -> Iterator[str]:
    servicer = health.HealthServicer()  # type: ignore[no-untyped-call]
    servicer.set(SERVICE, STATUS.SERVING)  # type: ignore[no-untyped-call]
    servicer.set("seamline.engine.v1.EngineService", STATUS.NOT_SERVING)  # type: ignore[no-untyped-call]
    server = grpc.server(futures.ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    server.add_insecure_port(f"unix:{tmp_path}/health.sock")
    server.start()
    yield f"unix:{tmp_path}/health.sock"
    server.stop(None).wait()


def test_http_answer_200_is_well() -> None:
    with http_server(200) as url:
        assert main([url]) == 0


def test_http_answer_503_is_not_well(capsys: pytest.CaptureFixture[str]) -> None:
    with http_server(503) as url:
        assert main([url]) == 1
    assert capsys.readouterr().err == f"{url} answers 503\n"


def test_http_that_nobody_serves_is_not_well(capsys: pytest.CaptureFixture[str]) -> None:
    with http_server(200) as url:
        pass
    assert main([url]) == 1
    assert f"{url} does not answer" in capsys.readouterr().err


def test_serving_grpc_service_is_well(grpc_address: str) -> None:
    assert main([grpc_address, SERVICE]) == 0


def test_without_a_service_the_process_is_checked(grpc_address: str) -> None:
    assert main([grpc_address]) == 0


def test_grpc_service_that_does_not_serve_is_not_well(
    grpc_address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([grpc_address, "seamline.engine.v1.EngineService"]) == 1
    assert "EngineService is NOT_SERVING" in capsys.readouterr().err


def test_unknown_grpc_service_is_not_well(
    grpc_address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([grpc_address, "no.such.Service"]) == 1
    assert "NOT_FOUND" in capsys.readouterr().err


def test_grpc_address_that_nobody_serves_is_not_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"unix:{tmp_path}/none.sock", "--timeout-s", "0.2"]) == 1
    assert "does not answer for the process: DEADLINE_EXCEEDED" in capsys.readouterr().err
