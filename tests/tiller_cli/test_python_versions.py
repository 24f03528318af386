"""The client runs on every Python from 3.11 on: nothing of it was removed from a later one."""

import ast
import sys

import pytest

from tests.rules.source_tree import imports, sources

# What was in the standard library of 3.11 and left it in 3.12, 3.13 or 3.14.
REMOVED = frozenset(
    [
        "aifc",
        "asynchat",
        "asyncore",
        "audioop",
        "cgi",
        "cgitb",
        "chunk",
        "crypt",
        "distutils",
        "imghdr",
        "imp",
        "lib2to3",
        "mailcap",
        "msilib",
        "nis",
        "nntplib",
        "ossaudiodev",
        "pipes",
        "smtpd",
        "sndhdr",
        "spwd",
        "sunau",
        "telnetlib",
        "uu",
        "xdrlib",
    ]
)
INSTALLED = frozenset({"httpx", "numpy", "pyarrow", "rich", "tiller"})


@pytest.mark.parametrize("source", sources("tiller"), ids=lambda source: source.name)
def test_the_client_imports_what_every_python_has_or_what_it_installs(source):
    for module, line in imports(source):
        top = module.partition(".")[0]
        known = top in INSTALLED or (top in sys.stdlib_module_names and top not in REMOVED)
        assert known, f"{source.name}:{line} imports {module}"


@pytest.mark.parametrize("source", sources("tiller"), ids=lambda source: source.name)
def test_the_client_is_written_in_the_syntax_of_the_oldest(source):
    ast.parse(source.path.read_text(encoding="utf-8"), feature_version=(3, 11))


def test_a_tensor_needs_no_codec_that_only_some_pythons_have():
    (tensors,) = (source for source in sources("tiller") if source.name.endswith("tensors.py"))
    found = {module.partition(".")[0] for module, _ in imports(tensors)}
    assert "pyarrow" in found
    assert not found & {"compression", "zstandard", "zstd", "pyzstd", "backports"}
