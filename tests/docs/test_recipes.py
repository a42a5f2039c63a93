"""The recipes run as one script in a session of their own, and others can read what they sent."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from tests.clusters import make_topic, repair
from tests.docs.blocks import ROOT, blocks_of
from tests.java_client import FOLDER, GENERATIONS, read_with_java, run_java
from tests.jvms import SMALL_PLANS, submit_args
from tests.python import run_python

PAGE = ROOT / "docs" / "guides" / "recipes.md"
JARS = Path(pyspark.__file__).parent / "jars"


@pytest.mark.cluster
@pytest.mark.spark
@pytest.mark.timeout(1200)
def test_the_recipes_run_and_java_reads_their_messages(local_cluster, tmp_path):
    repair(local_cluster)
    blocks = [b for b in blocks_of(PAGE) if b.language == "python" and not b.reason]
    code = "\n".join(block.text for block in blocks)
    topics = {name: f"{name}-{os.urandom(4).hex()}" for name in ("orders", "customer-changes")}
    for name, topic in topics.items():
        make_topic(local_cluster, topic)
        code = code.replace(f'"{name}"', f'"{topic}"')
    code = code.replace("127.0.0.1:9876", local_cluster.name_server)
    code = re.sub(r"(?<![\w.])/data\b", str(tmp_path), code)
    script = tmp_path / "recipes.py"
    script.write_text(code, encoding="utf-8")
    environ = {**os.environ, "PYSPARK_SUBMIT_ARGS": submit_args(conf=SMALL_PLANS)}
    run_python(script, environ=environ, cwd=tmp_path, timeout_s=1000)

    messages = read_with_java(local_cluster, topics["orders"])
    avro = [m.body.hex() for m in messages if m.tags == "avro" and m.body is not None]
    schema = re.search(r'ORDER_AVRO = """(.*?)"""', code, re.DOTALL)
    names = ("avro-1*.jar", "jackson-*.jar", "slf4j-api-*.jar", "commons-compress-*.jar")
    decoded = run_java(
        FOLDER / "DecodeAvro.java", " ".join(schema[1].split()), version=GENERATIONS[0],
        jars=[jar for name in names for jar in sorted(JARS.glob(name))], lines="\n".join(avro),
    )  # fmt: skip
    assert {schema_id for schema_id, _ in decoded} == {"41"}
    assert [json.loads(text)["id"] for _, text in decoded] in ([7, 8], [8, 7])

    events = [m for m in messages if m.tags == "cloudevents"]
    assert {m.properties["CE_id"] for m in events} == {"order-7", "order-8"}


FIRST_LINES, *RECIPES = PAGE.read_text(encoding="utf-8").split("\n## ")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.partition("\n")[0])
def test_a_recipe_needs_nothing_but_the_first_lines(recipe):
    code = "".join(re.findall("```python\n(.*?)```", FIRST_LINES + recipe, re.DOTALL))
    undefined_names = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=F821", "-"]
    assert subprocess.run(undefined_names, input=code, text=True, check=False).returncode == 0
