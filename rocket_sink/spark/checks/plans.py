"""Facts that the plans of Spark's queries tell: a digest, columns, input folders, partitions. Plans
are objects of the JVM, so Spark Connect shows none."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from rocket_sink.forks import ForkLock
from rocket_sink.ledger.epoch_starts import FRAME_FACT
from rocket_sink.ledger.storage import is_classic

_NUMBERS: Final = re.compile(
    r"(?m)#\d+L?|@[0-9a-f]+|0x[0-9a-f]+|(?<=\]), \d+$"
    r"|((?:CTERelation|UnionLoop)\w* |EventTimeWatermark |lambda \w+_)[\da-f-]+"
)
"""Numbers of columns, of common table expressions, of variables of lambda functions and of observed
metrics, ids of watermarks, and addresses of objects. The same frame gets others when it is made
again."""
_LONGEST_LIST: Final = "spark.sql.debug.maxToStringFields"
_whole_lists: Final = ForkLock()
"""The lock of `_LONGEST_LIST`, which threads would set back for each other."""


def plan_digest(plan: Any) -> str:
    """Return a digest of a plan's text, which is the same in each application. Spark cuts lists of
    columns and values in the text, by default after 25, so let it write all of them here."""
    conf = plan.conf()
    with _whole_lists:
        longest = conf.maxToStringFields()
        conf.setConfString(_LONGEST_LIST, str(2**31 - 1))
        try:
            text = _NUMBERS.sub(r"\1", plan.toString())
        finally:
            conf.setConfString(_LONGEST_LIST, str(longest))
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()[:12]


def schema_of(plan: Any) -> StructType:
    """Return the schema of a query's frame from its plan in the JVM."""
    return StructType.fromJson(json.loads(plan.schema().json()))


def input_folders(plan: Any) -> list[str]:
    """Return the folders of plain files that a query's plan reads. Folders of Delta tables are left
    out: a table's log names the files that belong to the table."""
    folders: list[str] = []
    # These classes are internal to Spark. If a version lacks them, return no folders.
    with contextlib.suppress(Exception):
        leaves = plan.collectLeaves()
        for leaf in map(leaves.apply, range(leaves.size())):
            kind = leaf.getClass().getSimpleName()
            if kind == "StreamingRelation" and leaf.sourceName().startswith("FileSource["):
                folders.append(leaf.sourceName()[len("FileSource[") : -1])
            elif kind == "LogicalRelation":
                index = leaf.relation().location()
                if index.getClass().getSimpleName() == "InMemoryFileIndex":
                    paths = index.rootPaths()
                    folders += [paths.apply(n).toString() for n in range(paths.size())]
    return folders


def frame_facts(df: DataFrame) -> dict[str, str]:
    """Return facts by which a batch frame is known again: its columns, the digest of its plan and
    its input folders, which the plan does not name. Spark Connect tells the columns only."""
    facts = {"columns": df.schema.simpleString(), "call": "sink.write"}
    if is_classic(df.sparkSession):
        plan = df._jdf.queryExecution().analyzed()
        facts["plan"] = plan_digest(plan)
        facts["input"] = ", ".join(sorted(input_folders(plan)))
    return facts


def planned_facts(df: DataFrame, *, is_write: bool) -> dict[str, str]:
    """Return facts of a frame that tell whether a replay has the same partitions: their number, and
    of a batch write its plan and input folders. If the frame is shuffled, the digest of its plan
    stands for the number, because Spark would run the shuffle to tell it. Over Spark Connect, which
    cannot tell either, return no facts."""
    if not is_classic(df.sparkSession):
        return {}
    execution = df._jdf.queryExecution()
    is_shuffled = "Exchange" in execution.executedPlan().toString()
    frame = frame_facts(df) if is_shuffled or is_write else {}
    number = frame["plan"] if is_shuffled else str(execution.toRdd().getNumPartitions())
    own = {FRAME_FACT: f"{frame['plan']} of {frame['input']}"} if is_write else {}
    return {"the partitions": number, **own}
