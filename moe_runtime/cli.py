"""The `moe-runtime` command. Heavy imports wait until a command needs them, so that --help is quick."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moe_runtime.errors import ConfigError

if TYPE_CHECKING:
    from moe_runtime.terminal.target import Target

app = typer.Typer(
    name="moe-runtime",
    help="Serve mixture-of-experts models with attention and experts on separate nodes.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file; see configs/.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="a.b=c", help="Override one value; may be given more than once.")
]

# What `chat` and `complete` share.
Url = Annotated[str, typer.Option(metavar="URL", help="The server's address, with or without /v1.")]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Holds the key; else MOE_RUNTIME_API_KEY or OPENAI_API_KEY in the environment, if set."
    ),
]
Model = Annotated[str | None, typer.Option(metavar="NAME", help="Default: the first that the server lists.")]
Temperature = Annotated[float | None, typer.Option(metavar="T", help="0 for the likeliest text.")]
MaxTokens = Annotated[int | None, typer.Option(metavar="N", help="End the answer after N tokens.")]
SetFields = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Any other field of the request, the value in YAML, such as top_k=40; may be given more than once.",
    ),
]
Timeout = Annotated[float, typer.Option(metavar="SECONDS", help="Give up when the server sends nothing for so long.")]
History = Annotated[bool, typer.Option("--history/--no-history", help="Remember what you type, for next time.")]
DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_TIMEOUT_S = 300.0


@app.command()
def launch(
    config_path: ConfigPath,
    port: Annotated[int | None, typer.Option(help="The gateway's port, 0 for a free one (gateway.port).")] = None,
    ask: Annotated[str | None, typer.Option(metavar="TEXT", help="Answer this on stdout, stop, and exit 0.")] = None,
    greet: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Answer this, show how to reach the server, and go on serving.")
    ] = None,
    overrides: Overrides = None,
    log_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Keep the nodes' logs here.")] = None,
) -> int:
    """Start a cluster and serve until Ctrl-C.

    Prints `ready: http://HOST:PORT` when every node is ready.

    Example: moe-runtime launch configs/demo.yaml --port 0 --set cluster.ffn_nodes=3 --ask "Why is the sky blue?"
    """
    from moe_runtime.config import load_config

    if ask is not None and greet is not None:
        raise ConfigError("--ask stops after the answer and --greet goes on serving; give one of them")
    port_override = [] if port is None else [f"gateway.port={port}"]
    config = load_config(config_path, [*(overrides or []), *port_override])

    from moe_runtime.cluster.launcher import LaunchOptions
    from moe_runtime.cluster.launcher import launch as launch_cluster

    return launch_cluster(config, LaunchOptions(ask=ask, greet=greet, log_dir=log_dir))


@app.command()
def check(config_path: ConfigPath, overrides: Overrides = None) -> int:
    """Read a configuration and print it whole, with every default.

    Example: moe-runtime check configs/demo.yaml --set exchange.lanes=4
    """
    import msgspec
    import yaml

    from moe_runtime.config import load_config

    config = load_config(config_path, overrides or [])
    typer.echo(yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False), nl=False)
    return 0


@app.command()
def demo_model(
    out: Annotated[Path, typer.Option(metavar="DIR", help="The directory to write.")],
    random: Annotated[
        str | None, typer.Option(metavar="FAMILY", help="A tiny random checkpoint of this family instead, for tests.")
    ] = None,
    fused: Annotated[bool, typer.Option("--fused", help="With --random: experts in fused 3-D tensors.")] = False,
    seed: Annotated[int, typer.Option(help="Draws the router and the permutations, or the random weights.")] = 0,
) -> int:
    """Build a real MoE chat model offline (1.4 GB), or a tiny random checkpoint.

    Example: moe-runtime demo-model --out build/models/demo

    Example: moe-runtime demo-model --out build/models/tiny --random qwen3_moe --fused
    """
    from moe_runtime.models.demo import build_demo_model, write_random_model

    if random is not None:
        write_random_model(random, out, seed=seed, fused=fused)
        typer.echo(f"{out}: a random {random} checkpoint")
    elif fused:
        raise ConfigError("--fused lays out a random checkpoint's experts; give --random FAMILY too")
    else:
        build_demo_model(out, seed=seed, progress=typer.echo)
    return 0


@app.command()
def quantize(
    source: Annotated[str, typer.Argument(metavar="IN", help="A plain checkpoint: its directory, or a model id.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The directory to write.")],
    form: Annotated[str, typer.Option("--format", help="The experts' format, such as w8a16, w4a16-g64, fp8, mxfp4.")],
    attention: Annotated[
        str | None, typer.Option(metavar="FORMAT", help="Attention and LM head too: w8a16 or w4a16-*.")
    ] = None,
    calibrate: Annotated[
        bool, typer.Option(help="Round four-bit formats with a bundled text's inputs in view.")
    ] = True,
    perplexity: Annotated[bool, typer.Option(help="Measure perplexity on another text before and after.")] = True,
) -> int:
    """Write a quantized checkpoint that loads without work, in compressed-tensors' layout.

    Prints each layer's relative error, and writes it to OUT/quantization.json. OUT appears whole or not at all.

    Example: moe-runtime quantize build/models/demo build/models/demo-w4 --format w4a16-g64 --attention w8a16
    """
    from rich.console import Console

    from moe_runtime.cluster.stop_signals import StopSignals
    from moe_runtime.models.hub import resolve_model
    from moe_runtime.models.quantized.command import quantize_checkpoint
    from moe_runtime.models.quantized.display import ProgressBar, Stopped
    from moe_runtime.models.quantized.report import show
    from moe_runtime.quant.formats import format_named

    experts = format_named(form, "--format")
    linears = format_named(attention, "--attention") if attention else None
    model_dir = resolve_model(source)
    with StopSignals() as signals:
        try:
            with ProgressBar(f"{model_dir.name} as {form}", lambda: signals.requested) as bar:
                report = quantize_checkpoint(
                    model_dir, out, experts, linears, calibrate=calibrate, measure=perplexity, progress=bar
                )
        except Stopped:
            return signals.exit_code
    show(report, Console())
    return 0


@app.command()
def chat(
    url: Url = DEFAULT_URL,
    api_key_file: KeyFile = None,
    model: Model = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system message.")] = None,
    temperature: Temperature = None,
    max_tokens: MaxTokens = None,
    fields: SetFields = None,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    history: History = True,
) -> int:
    """Converse with any OpenAI-compatible server.

    Ctrl-C stops an answer, not the program; Ctrl-D leaves; /help shows the rest. Where stdin or stdout is not a
    terminal, all of stdin is one message, and its answer is printed as plain text.

    Example: moe-runtime chat --url http://10.0.0.5:8000 --system "Be brief." --temperature 0.7 --set top_k=40

    Example: moe-runtime chat --set stop='["\\n"]' < question.txt
    """
    from moe_runtime.terminal.chat import chat as converse

    target = _target(url, api_key_file, model, temperature, max_tokens, fields, timeout)
    return converse(target, system, history)


@app.command()
def complete(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT|-", help="The text to go on from; - reads it from stdin.")
    ] = None,
    url: Url = DEFAULT_URL,
    api_key_file: KeyFile = None,
    model: Model = None,
    temperature: Temperature = None,
    max_tokens: MaxTokens = None,
    fields: SetFields = None,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    history: History = True,
) -> int:
    """Print how any OpenAI-compatible server goes on from a text.

    Without PROMPT, a terminal is asked for prompt after prompt; anything else is read whole, as with -. Ctrl-C stops
    the answer.

    Example: moe-runtime complete "The sky is" --max-tokens 40

    Example: git diff | moe-runtime complete - --temperature 0 > review.txt
    """
    from moe_runtime.terminal.complete import complete as complete_text

    target = _target(url, api_key_file, model, temperature, max_tokens, fields, timeout)
    return complete_text(target, prompt, history)


def _target(
    url: str,
    key_file: Path | None,
    model: str | None,
    temperature: float | None,
    max_tokens: int | None,
    assignments: list[str] | None,
    timeout_s: float,
) -> "Target":
    from moe_runtime.terminal.fields import check_value, read_fields
    from moe_runtime.terminal.target import make_target

    options: dict[str, Any] = {"temperature": check_value("--temperature", temperature), "max_tokens": max_tokens}
    given = {name: value for name, value in options.items() if value is not None}
    return make_target(url, key_file, model, given | read_fields(assignments or []), timeout_s)


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code; users' mistakes become one line on stderr and exit code 2."""
    try:
        return app(args=arguments, prog_name="moe-runtime", standalone_mode=False) or 0
    except typer.TyperException as error:
        return _refuse(f"{error.format_message()} (see moe-runtime --help)")
    except ValueError as error:
        return _refuse(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return 130


def _refuse(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


def main() -> None:
    sys.exit(run(sys.argv[1:]))
