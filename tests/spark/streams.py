"""Short streams: rows of a JSON file, and queries that end when they have read everything."""

from tests.ledger.views import view_rows
from tests.producer.waiting import until

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


def confirmed_epochs(spark, ledger):
    """Return the epochs of a ledger's views after Spark's reports of them, which come late."""
    epochs = []

    def are_confirmed():
        ledger.sync(spark)
        epochs[:] = view_rows(ledger.path, "SELECT * FROM epochs")
        return all(epoch.confirmed for epoch in epochs)

    until(are_confirmed, poll_s=0.2)
    return epochs
