"""Short streams: rows of a JSON file, and queries that end when they have read everything."""

ONE = '{"body": "one"}\n'


def stream_of(spark, folder, text=ONE, schema="body STRING"):
    """Return a stream of the JSON files in `<folder>/in`, whose first file has this text."""
    (folder / "in").mkdir()
    (folder / "in" / "1.json").write_text(text)
    return spark.readStream.schema(schema).json(str(folder / "in"))


def run(writer, checkpoint):
    """Run a query over everything that is there, and return it after its end."""
    query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    query.awaitTermination()
    return query
