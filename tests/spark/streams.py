"""Short streams: rows of a JSON file, and queries that end when they have read everything."""

from pathlib import Path
from typing import Any

ONE = '{"body": "one"}\n'


def stream_of(spark: Any, folder: Path, text: str = ONE, schema: str = "body STRING") -> Any:
    """Return a stream of the JSON files in `<folder>/in`, whose first file has this text."""
    (folder / "in").mkdir()
    (folder / "in" / "1.json").write_text(text)
    return spark.readStream.schema(schema).json(str(folder / "in"))


def run(writer: Any, checkpoint: Path) -> Any:
    """Run a query over everything that is there, and return it after its end."""
    query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    query.awaitTermination()
    return query
