"""The short form of the suite: what passes before each landing, in at most 12 minutes on two cores.

A test that starts Java (markers `spark`, `cluster`) is long unless `WITH_JAVA` names it; a test
without Java is short unless `LONG_WITHOUT_JAVA` names it. Whole runs leave the long ones out
(`tests/conftest.py`); `.ci/long`, the option `--long`, `-k`, and every run that names files or
folders take them along.

Each promise keeps its shortest proof here. The names are those of functions and methods; one with
brackets is of that parameter only. `tests/test_short.py` keeps the table true to the tests, and
holds it against the planted defects of `tests/mutation`.
"""

_CRASH = "test_nothing_is_lost_disordered_or_doubled_unseen"
WITH_JAVA = {
    # Spark's lanes: rows arrive whole and in order, bad ones become letters, faults lose nothing.
    "integration/test_lanes.py": (
        "test_rows_arrive_whole_in_order_and_the_ledger_adds_up",
        "test_bad_rows_become_dead_letters_and_the_epoch_goes_on",
        "test_what_is_checked_on_the_driver",
    ),
    "integration/test_lanes_faults.py": ("test_nothing_is_lost_when_a_broker_is_killed",),
    "integration/test_accounts.py": ("test_an_epoch_of_foreach_is_confirmed_with_sparks_rows",),
    "integration/test_replays.py": ("test_a_batch_write_that_died_is_asked_for_by_its_app_id",),
    "integration/test_commands.py": ("test_send_routes_tail_check",),
    "integration/test_found_by_spark.py": ("test_data_frames_streams_and_sql",),
    "crash/test_crash.py": (
        f"{_CRASH}[foreach-strict-at_least_once-worker_killed-request-1-made]",
        f"{_CRASH}[foreach_batch-strict-effectively_once-broker_killed-request-11-made]",
        f"{_CRASH}[foreach_batch-strict-effectively_once-driver_killed-committed-2-made]",
        "test_every_moment_was_hit",
    ),
    "spark/test_listener.py": (
        "test_a_ledger_or_checkpoint_inside_the_input_is_refused",
        "test_a_continuous_trigger_is_refused_before_an_epoch_is_done",
    ),
    "spark/test_transactional_epochs.py": (
        "test_an_epoch_is_hidden_until_its_append",
        "test_batch_writes_have_it_and_foreach_does_not",
    ),
    "spark/test_session.py": ("test_a_thread_that_has_run_nothing_yet_knows_the_session",),
    "spark/backfill/test_backfill.py": (
        "TestTables::test_a_table_is_sent_once_in_order_equal_rows_and_all",
        "TestTables::test_what_a_killed_backfill_sent_is_found",
        "TestDeadLetters::test_tries_killed_backfills_and_parked_letters",
    ),
    # The ledger: Spark, delta-rs and DuckDB read and write one table.
    "ledger/test_append.py": ("test_optimize_and_vacuum",),
    "ledger/test_fold.py": (
        "test_a_fold_by_sparks_delta_has_all_rows",
        "test_killed_at_each_step_and_repeated_each_row_is_there_once",
    ),
    "ledger/test_ledger.py": ("test_all_values_come_back_through_delta",),
    "ledger/test_views.py": ("test_spark_says_the_same",),
    "ledger/test_making.py": ("test_delta_rs_makes_the_table_that_sparks_delta_would_make",),
    "ledger/test_records.py": ("test_ddl_and_arrow_schema_are_the_same_columns",),
    "stores/test_short_forms.py": ("test_what_users_do_with_a_ledger_on_s3[two-drivers]",),
    "spark/test_frames.py": ("test_lanes_and_backfills_pack_the_same_text",),
    "task/test_worker_heap.py": ("test_workers_are_known_by_their_main_module",),
    # Real brokers, and what Java's own client reads of them.
    "producer/conformance/test_real_cluster.py": (
        "test_every_mode_arrives_once",
        "test_a_broker_fails_and_nothing_is_lost[kill]",
    ),
    "producer/conformance/test_real_modes.py": (
        "test_c73_transactions_end_in_five_ways",
        "test_faults_before_real_brokers",
        "test_gathered_batches_give_each_message_its_own_place",
    ),
    "producer/conformance/test_bodies.py": ("test_java_reads_every_body[5.5.0]",),
    "producer/conformance/test_sharding.py": ("test_numbers_go_where_java_sends_them",),
    "producer/conformance/test_tls.py": ("test_c66_both_verify_each_other",),
    "producer/conformance/test_acl.py": (
        "test_c63_every_mode_is_signed_as_the_broker_reckons",
    ),
    "task/test_groups_live.py": ("test_java_reads_what_was_sent_in_groups",),
    "commands/test_topic_types.py": ("test_on_a_real_broker",),
    "cluster/test_cluster_live.py": (
        "test_no_process_listens_beyond_loopback",
        "test_the_admin_tool_sees_what_the_probe_stored",
    ),
    "wire/test_golden.py": (
        "test_batches", "test_compressed_bodies", "test_frames_of_java_are_read",
        "test_java_inflates_our_bodies", "test_java_reads_our_frames",
        "test_java_reads_the_namespace_that_its_own_hook_sets", "test_javas_hash",
        "test_message_ids", "test_properties", "test_routes_in_the_legacy_form",
        "test_send_answers_are_read", "test_send_headers_have_javas_fields", "test_signatures",
        "test_stored_messages", "test_traces", "test_versions",
    ),
    "wire/test_message_rules.py": ("test_names_that_rocketmq_keeps_for_itself_are_refused",),
    # One page of each kind: a program, a shell session, both.
    "docs/test_blocks.py": (
        "test_a_page_runs_from_top_to_bottom[README.md]",
        "test_a_page_runs_from_top_to_bottom[docs/guides/producer.md]",
    ),
}  # fmt: skip
"""{file below tests/: the tests of it that start Java and are short}."""

LONG_WITHOUT_JAVA = (
    "hosts/", "stores/test_short_forms.py", "soak/", "mutation/test_defects.py",
    "ledger/test_report_scale.py::test_memory_and_page_stay_bounded",
    # The short run keeps another mode or number of each test.
    "producer/test_interrupts.py::test_interrupts_lose_no_send_and_no_place[batches",
    "producer/test_interrupts.py::test_interrupts_lose_no_send_and_no_place[threads",
    "spark/test_effectively_once.py::test_crash_upon_crash[best_effort",
    "spark/test_effectively_once.py::test_crash_upon_crash[strict",
    "stores/test_commits.py::test_a_fold_that_died_is_looked_for_in_all_later_commits[101",
    "wire/test_decompression_bombs.py::test_an_inner_batch_of_a_kilobyte[_decode_answer",
    "wire/test_decompression_bombs.py::test_looking_for_one_id_among_inner_batches_ends",
)  # fmt: skip
"""Files, folders, and tests (as above) that start no Java and are long all the same."""


def is_long(nodeid, *, java):
    """Tell whether whole runs leave a test out.

    Args:
        nodeid: pytest's, from the root of the tree.
        java: whether the test has the marker `spark` or `cluster`.
    """
    path, _, name = nodeid.removeprefix("tests/").partition("::")
    if java:
        names = WITH_JAVA.get(path, ())
        return name not in names and name.partition("[")[0] not in names
    return any(nodeid.removeprefix("tests/").startswith(long) for long in LONG_WITHOUT_JAVA)
