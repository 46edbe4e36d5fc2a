"""What `blockferry serve` does once its deployment is up: keep it whole, and take commands of other shells."""

from __future__ import annotations

from blockferry.cluster import run_record
from blockferry.cluster.control import open_control
from blockferry.cluster.running import Running
from blockferry.cluster.scaling import Scaling
from blockferry.cluster.supervisor import Supervisor


async def keep_up(running: Running) -> None:
    """Until cancelled. Raises GivenUp when scheduler or HTTP server fail again and again."""
    name = running.config.name

    def note_endpoint() -> None:
        endpoint = running.client_endpoint
        run_record.change_record(name, client_endpoint=endpoint.url, secret=endpoint.secret.text)

    supervisor = Supervisor(running, note_endpoint)
    path = run_record.control_path(name)
    async with open_control(path, Scaling(supervisor).handlers):
        run_record.change_record(name, control=str(path))
        await supervisor.run()
