"""`python -m gateway`: the gateway as a process."""

from gateway.app import start_gateway
from gateway.settings import GatewaySettings
from services.process import run_service

if __name__ == "__main__":
    run_service("gateway", GatewaySettings, start_gateway)
