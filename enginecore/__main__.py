"""`python -m enginecore`."""

from enginecore.app import start_enginecore
from enginecore.settings import EnginecoreSettings
from services.process import run_service

if __name__ == "__main__":
    run_service("enginecore", EnginecoreSettings, start_enginecore)
