"""The pipeline's commands, in the order of the help.

Each command is a short script over the pipeline; terminal.py prints its results. Progress goes to
stderr, results to stdout.
"""

import typer

from pipeline.cli.commands.bench import bench
from pipeline.cli.commands.compile import compile_
from pipeline.cli.commands.engine import advise, validate
from pipeline.cli.commands.host import doctor, store
from pipeline.cli.commands.model import inspect, lint, write_onnx
from pipeline.cli.commands.record import record

app = typer.Typer()
# what follows the script's name belongs to the script, with or without `--`
app.command(context_settings={"allow_interspersed_args": False})(record)
app.command("compile")(compile_)
app.command()(validate)
app.command()(bench)
app.command()(advise)
app.command()(inspect)
app.command("onnx")(write_onnx)
app.command()(lint)
app.command()(doctor)
app.command()(store)
