"""`python -m accountant_service` is the command `accountant`."""

from accountant_service.cli import app

if __name__ == "__main__":
    app(prog_name="accountant")
