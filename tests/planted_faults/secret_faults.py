"""Faults of what keeps secrets out of command lines, scripts and messages."""

from tests.planted_faults.fault import Fault

SECRET_FAULTS = (
    Fault(
        name="the values of --env stand in the command lines of hosts",
        kind="shown secret",
        file="hetero/commands/launch.py",
        find="        words = options.words(host, num_nodes=len(hosts))\n        text",
        replace='        words = ["env", *(f"{name}={value}" for name, value in environment.items())]\n'
        "        words += options.words(host, num_nodes=len(hosts))\n        text",
        hints=("tests/unit/launch/test_command.py",),
    ),
    Fault(
        name="the step of an allocation has the values of --env in its command line",
        kind="shown secret",
        file="hetero/commands/launch.py",
        find="return run_step(job, words, environment,",
        replace="return run_step(job, [*words, *_values(dict(args.env)).values()], environment,",
        hints=("tests/unit/launch/test_command.py",),
    ),
    Fault(
        name="others may read a batch script with values of --env",
        kind="shown secret",
        file="hetero/commands/launch.py",
        find="is_private=has_values",
        replace="is_private=False",
        hints=("tests/unit/launch/test_command.py",),
    ),
    Fault(
        name="a plan, a profile and a script keep the values of --env",
        kind="shown secret",
        file="hetero/shown_secrets.py",
        find="map(without_secrets, _without_values(words))",
        replace="map(without_secrets, words)",
        hints=("tests/unit/test_shown_secrets.py", "tests/unit/launch/test_command.py"),
    ),
    Fault(
        name="credentials in front of a host without a scheme are shown",
        kind="shown secret",
        file="hetero/shown_secrets.py",
        find="if any(pattern.search(url) for pattern in _SECRETS_OF_URL)",
        replace="if any(pattern.search(url) for pattern in _SECRETS)",
        hints=("tests/unit/test_shown_secrets.py",),
    ),
    Fault(
        name="a variable with a second line loses it on its way to a host",
        kind="wrong input",
        file="hetero/launch/ssh.py",
        find='assignments.replace("\\n", "\'\\"$hetero_newline\\"\'")',
        replace="assignments",
        hints=("tests/unit/launch/test_ssh.py",),
    ),
    Fault(
        name="a host that begins with a dash is an option of ssh",
        kind="missing check",
        file="hetero/launch/ssh.py",
        find='[*ssh, "--", host,',
        replace="[*ssh, host,",
        hints=("tests/unit/launch/test_ssh.py",),
    ),
    Fault(
        name="a user that begins with a dash is one of ssh",
        kind="missing check",
        file="hetero/launch/hosts.py",
        find=r"(?:[\w.][\w.-]*@)?",
        replace=r"(?:[\w.-]+@)?",
        hints=("tests/unit/launch/test_command.py",),
    ),
    Fault(
        name="messages of an object store show the password of its endpoint",
        kind="shown secret",
        file="hetero/elastic/stored_step.py",
        find='return without_secrets(" ".join(str(error).partition("\\n\\nDebug source")[0].split()))',
        replace='return " ".join(str(error).partition("\\n\\nDebug source")[0].split())',
        hints=("tests/elastic/test_refusing_stores.py",),
    ),
    Fault(
        name="etcd is spoken to with a URL that has a password",
        kind="missing check",
        file="hetero/elastic/etcd.py",
        find="            refuse_credentials(\n"
        '                url, name="--etcd", instead="show who you are with a certificate (--etcd-cert, --etcd-key)"\n'
        "            )\n",
        replace="",
        hints=("tests/elastic/test_membership.py",),
    ),
    Fault(
        name="the status of a job shows the credentials in its settings",
        kind="shown secret",
        file="hetero/commands/elastic.py",
        find="None if state.settings is None else shown_settings(state.settings)",
        replace="state.settings",
        hints=("tests/unit/test_outputs.py",),
    ),
)
