"""Defects that the suite must catch: realistic mistakes, each with the narrowest tests that see it.

`python -m tests.mutation` plants them one at a time. `test_defects.py` keeps this table true to the
code: `before` is in its file exactly once, the planted file parses, the named tests exist.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Defect:
    """A realistic mistake and the tests that see it.

    Attributes:
        path: the file, from the root of the tree.
        before, after: the text that is there, and the mistake in its place.
        tests: files or ids for pytest, of which at least one must fail.
        why: what a user would lose.
    """

    name: str
    path: str
    before: str
    after: str
    tests: tuple[str, ...]
    why: str


_backfill = "tests/spark/backfill/test_backfill.py"

WIRE: tuple[Defect, ...] = (
    Defect(
        "signed-key-query",
        "rocket_sink/wire/acl.py",
        "_UNSIGNED: Final = (SIGNATURE, UNIQUE_KEY_QUERY)\n",
        "_UNSIGNED: Final = (SIGNATURE,)\n",
        (
            "tests/wire/test_acl.py",
            "tests/producer/conformance/test_acl.py::test_messages_are_found_by_id_and_key",
        ),
        "effectively once never gets over a replay on brokers of 4.9 with ACL",
    ),
    Defect(
        "remarks-show-access-keys",
        "rocket_sink/wire/connection.py",
        "                    if frame.remark is not None and self._hide is not None:\n",
        "                    if frame.remark is not None and self._sign is None and self._hide:\n",
        ("tests/producer/test_producer.py::test_remarks_are_shown_without_credentials",),
        "access keys are in the logs of drivers and executors, and in Spark's event log",
    ),
    Defect(
        "answers-before-garbage",
        "rocket_sink/wire/connection.py",
        "            events.append(Violation(error))\n",
        "            events = [Violation(error)]\n",
        ("tests/wire/test_connection.py::test_answers_before_garbage_count",),
        "answers in front of broken bytes are forgotten, and stored messages are sent again",
    ),
    Defect(
        "opaque-id-in-flight",
        "rocket_sink/wire/connection.py",
        "        if opaque < OPAQUES - 1 and self._issued < OPAQUES and opaque not in in_flight:\n",
        "        if opaque < OPAQUES - 1 and self._issued < OPAQUES:\n",
        ("tests/wire/test_connection.py::test_an_id_in_flight_is_not_given_twice",),
        "the answer to one request settles another one",
    ),
    Defect(
        "earlier-requests-unwritten",
        "rocket_sink/wire/connection.py",
        "            pending.written = True\n"
        "            pending.sent_s = now_s\n"
        "            if pending.token is token:\n"
        "                return\n",
        "            if pending.token is token:\n"
        "                pending.written = True\n"
        "                pending.sent_s = now_s\n"
        "                return\n",
        (
            "tests/wire/test_connection.py::test_writing_a_request_means_that_all_before_it_are_written",
        ),
        "a request that left is taken for NOT_SENT, and its message is doubled without a count",
    ),
    Defect(
        "secret-in-repr",
        "rocket_sink/wire/acl.py",
        'return "Credentials(access_key=***, secret_key=***)"',
        'return f"Credentials(access_key=***, secret_key={self._secret.reveal()})"',
        ("tests/wire/test_acl.py::test_c65_secrets_do_not_print",),
        "the secret key is in every log line that shows the credentials",
    ),
    Defect(
        "linked-lz4-blocks",
        "rocket_sink/wire/compress.py",
        "block_linked=False",
        "block_linked=True",
        ("tests/wire/test_compress.py::test_lz4_blocks_do_not_depend_on_each_other",),
        "Java's consumers cannot inflate the body and skip the message",
    ),
    Defect(
        "timed-message-in-a-batch",
        "rocket_sink/wire/batch.py",
        "        if message.is_timed:\n",
        "        if message.delay_level:\n",
        ("tests/wire/test_batch.py::test_messages_that_cannot_travel_together",),
        "a message with delay_ms goes in a batch, and the broker delivers it at once",
    ),
    Defect(
        "message-ids-repeat",
        "rocket_sink/wire/ids.py",
        "        self._now_ms = max(now_ms, self._now_ms + 1)\n",
        "        self._now_ms = now_ms\n",
        (
            "tests/wire/test_ids.py::test_ids_never_repeat_even_when_the_clock_stands_still_or_goes_back",
        ),
        "two messages share one id after the clock went back, and one is taken for a duplicate",
    ),
)

WIRE_COLUMNS: tuple[Defect, ...] = (
    Defect(
        "unstable-grouping",
        "rocket_sink/wire/columns/encode.py",
        'np.argsort(small, kind="stable")',
        "np.argsort(small)",
        ("tests/wire/test_columns.py::test_grouping_is_a_stable_sort_by_queue",),
        "rows of one queue change their order",
    ),
    Defect(
        "null-wait-store",
        "rocket_sink/wire/columns/properties.py",
        "wait_store.fill_null(True)",
        "wait_store.fill_null(False)",
        (
            "tests/wire/test_columns_properties.py::test_a_null_beside_a_row_that_does_not_wait_still_waits",
        ),
        "a row that says nothing is acknowledged before it is on disk",
    ),
    Defect(
        "sliced-map-offsets",
        "rocket_sink/wire/columns/properties.py",
        "        rows - first,\n",
        "        rows,\n",
        (
            "tests/wire/test_columns_properties.py::test_strings_are_those_of_the_one_message_encoder",
        ),
        "rows of a sliced batch carry the user properties of others",
    ),
)

ROUTING: tuple[Defect, ...] = (
    Defect(
        "rights-are-passwords",
        "rocket_sink/routing/retry.py",
        'r"\\bis forbidden|has no permission to access"',
        'r"\\bis forbidden"',
        ("tests/routing/test_response_errors.py",),
        "one row for a topic without the right to publish ends the whole write",
    ),
    Defect(
        "isolation-cut-short",
        "rocket_sink/routing/fault.py",
        "                start_s = max(start_s, old.start_s)\n",
        "                start_s = max(start_s, now_s)\n",
        ("tests/routing/test_fault.py::test_a_shorter_isolation_does_not_cut_a_longer_one",),
        "one slow answer puts a broken broker back into use",
    ),
    Defect(
        "strict-order-sends-again",
        "rocket_sink/routing/retry.py",
        "    if strict and isinstance(error, RequestTimeoutError):\n        return False\n",
        "    if strict and isinstance(error, RequestTimeoutError):\n"
        "        return attempts_left > 0\n",
        ("tests/routing/test_retry.py::test_strict_order_never_sends_again_what_may_still_arrive",),
        "a request that is still on its way is stored behind its own repetition",
    ),
    Defect(
        "surrogate-pairs",
        "rocket_sink/routing/hashing.py",
        " + (data >= 0xF0)\n",
        "\n",
        ("tests/routing/test_hashing.py::test_all_lengths_of_utf8_and_surrogates",),
        "keys with characters beyond U+FFFF go to another queue than those of Java's clients",
    ),
    Defect(
        "lost-turns",
        "rocket_sink/routing/selectors.py",
        "        self.turn = turn + 1 if turn + 1 < len(targets) else 0\n",
        "        self.turn = turn + 2 if turn + 2 < len(targets) else 0\n",
        ("tests/routing/test_choice.py::test_fair_shares_while_brokers_come_and_go",),
        "every other queue of a broker starves",
    ),
    Defect(
        "full-broker-escaped",
        "rocket_sink/routing/selectors.py",
        "            if not is_best and (not worse or group.rank >= UNREACHABLE):\n",
        "            if not is_best and group.rank >= UNREACHABLE:\n",
        (
            (
                "tests/routing/test_choice.py"
                "::test_a_full_broker_is_waited_for_and_not_escaped_to_a_worse_one"
            ),
        ),
        "an isolated broker gets what a busy one has no room for at the moment",
    ),
    Defect(
        "load-before-rank",
        "rocket_sink/routing/selectors.py",
        "            if broker is not None:\n                return broker.take()\n",
        "            if broker is not None and (\n"
        "                broker.load.in_flight <= FREE_IN_FLIGHT or group is groups[-1]\n"
        "            ):\n                return broker.take()\n",
        ("tests/routing/test_choice.py", "tests/producer/test_bad_brokers.py"),
        "a bad broker gets what exceeds 16 requests in flight at the good one",
    ),
    Defect(
        "window-collected",
        "rocket_sink/routing/selectors.py",
        "            limits[broker.name] = FREE_IN_FLIGHT + LOAD_FACTOR * fair\n",
        '            limits[broker.name] = float("inf")\n',
        (
            (
                "tests/routing/test_choice.py"
                "::test_a_broker_that_answers_nothing_collects_its_share_and_little_more"
            ),
        ),
        "a broker that stops answering takes the whole window before it is suspect",
    ),
    Defect(
        "each-choice-looks-at-all",
        "rocket_sink/routing/selectors.py",
        "        self._choices -= 1\n",
        "        self._choices = 0\n",
        (
            "tests/routing/test_choice.py::test_a_choice_among_many_brokers_does_not_look_at_the_load_of_each",
        ),
        "each message to a large cluster costs a look at every broker",
    ),
    Defect(
        "cut-per-busy-answer",
        "rocket_sink/routing/rate_limit.py",
        "        if sent_s >= self._cut_s:\n",
        "        if now_s >= self._cut_s:\n",
        (
            "tests/routing/test_rate_limit.py::TestAimdWindow::test_the_answers_to_one_window_cut_once",
        ),
        "the busy answers to one window close the window to one request",
    ),
    Defect(
        "shared-faults-erased",
        "rocket_sink/routing/fault.py",
        "            elif now_s >= item.start_s + _FORGOTTEN_S:\n",
        "            else:\n",
        (
            "tests/routing/test_fault.py::test_brokers_that_are_unknown_here_are_left_to_those_who_know_them",
        ),
        "each new worker makes the others of its host send to a dead broker again",
    ),
)

NET: tuple[Defect, ...] = (
    Defect(
        "floods-take-all-turns",
        "rocket_sink/net/channel.py",
        "            if unasked > _UNASKED_MAX or (unasked and self._read_bytes < READ_BYTES):\n",
        "            if unasked > 1 << 30:\n",
        ("tests/net/test_transport.py",),
        "a broker that floods a client makes sends to the others take a second",
    ),
    Defect(
        "one-address-of-a-name",
        "rocket_sink/net/transport.py",
        "        return now_s - self._since_s >= self._patience_s\n",
        "        return now_s - self._since_s >= 60 * self._patience_s\n",
        ("tests/net/test_transport.py",),
        "a host name whose first address is silent is never reached: rows end as dead letters",
    ),
    Defect(
        "silent-addresses-are-tried-once",
        "rocket_sink/net/transport.py",
        "            self._silent.append(self._target)\n",
        "            pass\n",
        ("tests/net/test_transport.py::test_slow_addresses_are_tried_again_with_more_patience",),
        "a name server behind a slow line is given up after a quarter of a second",
    ),
    Defect(
        "silent-address-comes-first-again",
        "rocket_sink/net/resolve.py",
        "            failed[address] = None\n",
        "            failed.pop(address, None)\n",
        ("tests/net/test_transport.py",),
        "each connection begins with the address that is silent",
    ),
    Defect(
        "broken-connection-used",
        "rocket_sink/net/client.py",
        "if channel is not None and channel.connection.state is not ConnectionState.OPEN:",
        "if False:",
        ("tests/net/test_client.py",),
        "a topic's route is never looked up again after a name server's garbage",
    ),
    Defect(
        "given-up-is-lost-connection",
        "rocket_sink/net/channel.py",
        "        if may_be_stored and isinstance(cause, NotSentError):\n",
        "        if False:\n",
        ("tests/producer/engine/test_outcomes.py",),
        "the report says to start a broker that runs",
    ),
    Defect(
        "dropped-answers-waited-for",
        "rocket_sink/producer/engine/stored_check.py",
        "                channel.connection.hasten(attempt)\n",
        "                break\n",
        (
            "tests/producer/engine/test_stored_checks.py::test_a_broker_that_answers_others_is_asked",
        ),
        "effectively once: a batch whose answer the broker drops holds its task, and strict keys, "
        "for a minute",
    ),
    Defect(
        "unanswered-taken-for-lost",
        "rocket_sink/producer/engine/stored_check.py",
        "                and attempt.broker.stored_sent_s >= sent_s\n",
        "",
        (
            "tests/producer/engine/test_stored_checks.py::test_a_broker_that_stores_nothing_else_may_still_store_it",
        ),
        "effectively once: what waits in a slow broker is sent again, and stored twice",
    ),
    Defect(
        "partly-written-frame-withdrawn",
        "rocket_sink/net/channel.py",
        "            touched = position == 0 and self._first_done > 0\n",
        "            touched = position == 0 and self._first_done >= entry[2]\n",
        ("tests/net/test_write_queue.py::test_withdraw_leaves_what_is_partly_written",),
        "half a frame is left on the connection and its request is called NOT_SENT",
    ),
    Defect(
        "forged-log-lines",
        "rocket_sink/net/log.py",
        "        text = clean(record.getMessage(), _RECORD_CHARS)\n",
        "        text = record.getMessage()[:_RECORD_CHARS]\n",
        ("tests/net/test_log.py::test_each_logger_writes_one_printable_line",),
        "a broker's remark writes lines of its own into the log",
    ),
    Defect(
        "server-name-unchecked",
        "rocket_sink/net/tls.py",
        '    if options.tls_mode != "verify-full":\n',
        '    if options.tls_mode != "verify-full" or not options.tls_server_name:\n',
        (
            "tests/net/test_transport.py::test_tls_with_another_name_is_refused_and_the_option_is_named",
        ),
        "tlsMode=verify-full talks to any server with a certificate of the same authority",
    ),
    Defect(
        "oneway-withdrawn",
        "rocket_sink/net/channel.py",
        "                stays = entry[0] is None or type(entry[0]) is OnewayWrite\n",
        "                stays = entry[0] is None\n",
        ("tests/net/test_write_queue.py",),
        "a oneway message is lost without a word when its broker becomes suspect",
    ),
)

PRODUCER = (
    Defect(
        "full-table-isolates-nobody",
        "rocket_sink/producer/engine/shared_state.py",
        "        if len(items) == _FAULTS:\n",
        "        if len(items) > _FAULTS:\n",
        ("tests/producer/engine/test_shared_state.py",),
        "with 512 isolated topics no broker is isolated any more",
    ),
    Defect(
        "nobody-asks-for-the-policy",
        "rocket_sink/producer/engine/dispatcher.py",
        "        if request.lacks_keys and not self._may_lack_keys(attempt, target, now_s):\n",
        "        if request.lacks_keys and request.queue and not self._may_lack_keys(\n"
        "            attempt, target, now_s\n        ):\n",
        ("tests/producer/engine/test_topic_policies.py",),
        "rows without keys in a compaction topic are acknowledged, and no consumer sees them",
    ),
    Defect(
        "policy-of-another-time",
        "rocket_sink/producer/engine/topic_policies.py",
        "now_s - asked_s >= AGE_S:",
        "now_s - asked_s >= 1e9:",
        (
            "tests/producer/engine/test_topic_policies.py::test_a_topic_that_is_made_anew_is_noticed",
        ),
        "a topic that was made anew with another policy loses messages until the workers end",
    ),
    Defect(
        "batches-brokers-cannot-count",
        "rocket_sink/producer/request_builder.py",
        " or len(batch) == BATCH_MAX_MESSAGES):",
        "):",
        ("tests/producer/test_batches.py::test_a_batch_has_no_more_messages_than_brokers_count",),
        "after one batch of 33,000 messages all that its queue is sent later is lost",
    ),
    Defect(
        "namespace-not-measured",
        "rocket_sink/producer/request_builder.py",
        "        check_topic_once(topic)\n",
        "        pass\n",
        ("tests/producer/test_namespace.py",),
        "each message of a name that is too long goes to all brokers",
    ),
    Defect(
        "unknown-outcome-forgotten",
        "rocket_sink/producer/engine/response_handler.py",
        "            history.unknown = error\n        if decision.refresh_route",
        "            history.unknown = None\n        if decision.refresh_route",
        ("tests/producer/engine/test_outcomes.py::test_unknown_wins_over_what_follows",),
        "a message that may be stored is reported as not sent",
    ),
    Defect(
        "unknown-is-no-duplicate",
        "rocket_sink/producer/engine/response_handler.py",
        "history is not None and (history.unknown is not None or history.degraded is not None),\n",
        "history is not None and history.degraded is not None,\n",
        ("tests/producer/engine/test_outcomes.py::test_unknown_then_acked_is_marked",),
        "a message sent again after a lost connection is not counted as possibly stored twice",
    ),
    Defect(
        "isolation-seen-late",
        "rocket_sink/producer/engine/brokers.py",
        '            self._next_view_s = float("-inf")\n',
        "",
        ("tests/producer/engine/test_brokers.py::test_an_isolation_counts_for_the_next_request",),
        "for 20 ms after its isolation a broker gets a window of requests",
    ),
    Defect(
        "suspicion-outside-the-order",
        "rocket_sink/producer/engine/brokers.py",
        "                self.ranks_version += 1\n                if (suspect,",
        "                if (suspect,",
        (
            (
                "tests/producer/engine/test_brokers.py"
                "::test_without_fault_tolerance_only_suspicion_counts"
            ),
        ),
        "a frozen broker gets its share until the next isolation of any other",
    ),
    Defect(
        "waits-for-old-ranks",
        "rocket_sink/producer/engine/waiting.py",
        "        if self._ranks_version != brokers.ranks_version:\n",
        "        if False:\n",
        (
            (
                "tests/producer/engine/test_waiting.py"
                "::test_a_busy_brokers_places_are_given_out_in_order"
            ),
        ),
        "what waits for a busy broker stays there when the broker is isolated",
    ),
    Defect(
        "late-requests-wait-for-the-best",
        "rocket_sink/producer/engine/waiting.py",
        "brokers.open_to(*place)\n",
        "brokers.open_to(place[0], False)\n",
        (
            "tests/producer/engine/test_waiting.py::test_room_at_a_worse_broker_is_given_to_those_whose_share_of_the_time_is_over",
        ),
        "messages fail while a broker that would take them has room",
    ),
    Defect(
        "silence-moves-nothing",
        "rocket_sink/producer/engine/brokers.py",
        "                if (suspect, silent) > (broker.suspect, broker.silent):\n",
        "                if suspect and not broker.suspect:\n",
        (
            "tests/producer/engine/test_brokers.py::test_who_falls_silent_after_all_were_suspect_is_worse_than_the_others",
        ),
        "requests of which no byte was sent stay at a frozen broker",
    ),
    Defect(
        "refusal-hidden-by-a-wait",
        "rocket_sink/producer/engine/dispatcher.py",
        "        if attempt.history is not None and attempt.history.last_error is not None:\n",
        "        if attempt.waits is not Wait.BROKER and attempt.history is not None and ("
        "attempt.history.last_error is not None):\n",
        (
            (
                "tests/producer/engine/test_rate_limits.py"
                "::test_the_last_answer_is_the_error_of_what_finds_no_place_in_time"
            ),
        ),
        "a dead letter says that its broker was busy, and not that the broker's disk is full",
    ),
    Defect(
        "full-disk-is-ready",
        "rocket_sink/commands/check.py",
        "> _DISK_FULL:\n",
        "> 1.0:\n",
        ("tests/commands/test_check_disk.py",),
        "`rocket-sink check` says ready for a broker that refuses every message",
    ),
    Defect(
        "order-of-a-queue-not-kept",
        "rocket_sink/producer/engine/waiting.py",
        "        return len(line) == 1\n",
        "        return True\n",
        (
            (
                "tests/producer/engine/test_faults.py"
                "::test_strict_order_has_one_request_in_flight_per_queue"
            ),
        ),
        "a retried message is overtaken by the one behind it",
    ),
    Defect(
        "place-in-the-window-kept",
        "rocket_sink/producer/engine/response_handler.py",
        "        attempt.broker = None\n        self._brokers.release(broker)\n",
        "        attempt.broker = None\n",
        (
            "tests/producer/engine/test_faults.py::test_a_short_pause_doubles_nothing",
            "tests/producer/engine/test_faults.py::test_every_place_in_the_window_is_given_back",
        ),
        "brokers seem to be full, and sends stop",
    ),
    Defect(
        "found-stored-not-told",
        "rocket_sink/producer/engine/response_handler.py",
        "            completion.found_stored = True\n",
        "",
        ("tests/producer/engine/test_stored_checks.py",),
        "the ledger does not tell that a message was found stored",
    ),
    Defect(
        "closed-topics-look-empty",
        "rocket_sink/producer/admin/admin.py",
        "        if closed:\n",
        "        if closed and not masters:\n",
        ("tests/commands/test_dlq.py",),
        "dlq list says 0 dead letters of a topic that may not be read",
    ),
    Defect(
        "look-ups-without-the-right",
        "rocket_sink/producer/admin/stored_messages.py",
        "        if isinstance(error, PermissionDeniedError):\n",
        "        if isinstance(error, AuthenticationError):\n",
        ("tests/producer/admin/test_stored_messages.py",),
        "a replay of a user who may only publish ends after a minute, and names no right",
    ),
    Defect(
        "unknown-at-one-server",
        "rocket_sink/producer/engine/routes.py",
        "        count = len(self.unasked) if self.of_all or self.answers else 1\n",
        "        if self.answers and not self.of_all:\n"
        "            return self._end(now_s)\n"
        "        count = len(self.unasked) if self.of_all else 1\n",
        ("tests/producer/engine/test_name_servers.py",),
        "sends fail for want of a route beside a name server that was started anew",
    ),
    Defect(
        "template-of-another-cluster",
        "rocket_sink/producer/engine/routes.py",
        "        if not set.intersection(*brokers.values()):\n",
        "        if not set.union(*brokers.values()):\n",
        ("tests/producer/engine/test_name_servers.py",),
        "messages go to another cluster, whose name server is in the list by mistake",
    ),
    Defect(
        "foreign-server-is-ready",
        "rocket_sink/commands/check.py",
        "    if len(strangers) >= len(friends):\n",
        "    if not friends:\n",
        ("tests/producer/engine/test_name_servers.py::test_check_names_the_server_that_disagrees",),
        "check says ready for a name server of another cluster",
    ),
    Defect(
        "old-addresses",
        "rocket_sink/producer/engine/routes.py",
        "for state in sorted(self._topics.values(), key=lambda entry: entry.fetched_s):\n",
        "for state in list(self._topics.values()):\n",
        (
            "tests/producer/engine/test_moved_brokers.py::test_the_newest_route_says_where_a_broker_is",
        ),
        "ends of transactions go to a dead address as long as another topic's route is older",
    ),
    Defect(
        "strict-keys-move",
        "rocket_sink/producer/producer.py",
        "        if route is not None and not route.masters.keys() <= info.masters.keys():\n",
        "        if route is not None and not info.masters:\n",
        (
            "tests/producer/test_producer.py::test_with_strict_order_no_key_moves_while_a_broker_has_no_master",
        ),
        "a key's messages are in two queues, and consumed out of order",
    ),
    Defect(
        "producers-thread-ends",
        "rocket_sink/producer/driver.py",
        "            except BaseException:\n                # Go on: without this thread",
        "            except KeyError:\n                # Go on: without this thread",
        (
            "tests/producer/test_ends.py::test_an_error_of_a_round_does_not_end_the_producers_thread",
        ),
        "after one wrong value of a hook no future of send_async ever ends",
    ),
    Defect(
        "listeners-keep-old-routes",
        "rocket_sink/producer/engine/heartbeat.py",
        "            self._routes.refresh_old(now_s)\n",
        "            self._routes.look_ups += 0\n",
        ("tests/producer/test_transactions.py::test_who_only_listens_follows_a_broker_that_moves",),
        "half messages of a broker that has moved are never decided by a process that only listens",
    ),
    Defect(
        "check-thread-ends",
        "rocket_sink/producer/transactions.py",
        "            except Exception:\n                # The later checks",
        "            except KeyError:\n                # The later checks",
        (
            "tests/producer/test_transactions.py::test_a_check_that_cannot_be_answered_stops_no_other",
        ),
        "after one check that fails no transaction is decided any more",
    ),
    Defect(
        "places-lost-to-addresses",
        "rocket_sink/net/client.py",
        "        except Exception as error:\n            # Addresses are a peer's texts",
        "        except OSError as error:\n            # Addresses are a peer's texts",
        ("tests/producer/test_ends.py::test_a_connection_that_cannot_be_made_keeps_no_place",),
        "each send to such a broker keeps a place, until the window is full for good",
    ),
    Defect(
        "ids-are-split",
        "rocket_sink/producer/admin/admin.py",
        "                return properties.get(UNIQ_KEY) == key\n",
        '                return key in properties.get(UNIQ_KEY, "").split(KEY_SEPARATOR)\n',
        ("tests/producer/admin/test_dlq.py::test_an_id_with_a_blank_is_found_again",),
        "each run of `dlq resend` sends a letter whose id has a blank once more",
    ),
    Defect(
        "slots-are-used-up",
        "rocket_sink/producer/engine/mapped_table.py",
        "            if entry is None or not entry[1]:\n",
        "            if entry is None or not entry[0]:\n",
        (
            "tests/producer/engine/test_shared_state.py::test_topics_that_were_isolated_do_not_fill_the_table",
        ),
        "after 512 topics without permission a host's workers isolate no broker",
    ),
    Defect(
        "heartbeats-end",
        "rocket_sink/producer/driver.py",
        "        engine.heartbeats.reconnects = True\n",
        "        engine.heartbeats.reconnects = False\n",
        ("tests/producer/test_producer.py::test_an_idle_producer_greets_brokers_that_are_back",),
        "brokers do not know an idle producer's group after a restart",
    ),
    Defect(
        "requesters-fault-is-brokers",
        "rocket_sink/routing/retry.py",
        '        (1, r"^push reply message fail, channel of .* not found", RequesterGoneError),\n',
        "",
        (
            "tests/producer/test_request_reply.py::test_a_requester_that_is_gone_is_no_brokers_fault",
        ),
        "one requester that is gone keeps all sends from healthy brokers",
    ),
    Defect(
        "unmade-commits-stay-open",
        "rocket_sink/net/client.py",
        "            channel.connection.cancel(owner)\n",
        "",
        (
            "tests/producer/admin/test_half_commits.py::test_frames_that_cannot_be_made_leave_nothing_behind",
        ),
        "commits that were never sent end twice, and as timed out",
    ),
    Defect(
        "interrupts-unseen",
        "rocket_sink/producer/driver.py",
        "        if self._in_step:\n",
        "        if False:\n",
        (
            "tests/producer/test_interrupts.py::test_a_step_that_was_interrupted_ends_the_sends_of_others",
        ),
        "after Ctrl-C places of the window are lost, until no send finds one",
    ),
    Defect(
        "dead-leaders-lead",
        "rocket_sink/producer/driver.py",
        "                    if follower.asleep and is_unled:\n",
        "                    if False:\n",
        (
            "tests/producer/test_interrupts.py::test_a_leader_that_was_interrupted_is_followed_by_another_thread",
        ),
        "after Ctrl-C in the thread that leads no other thread's send ends in time",
    ),
    Defect(
        "followers-end-fresh-leaderships",
        "rocket_sink/producer/driver.py",
        "leadership == self._leadership and not self._leading.locked()\n",
        "not self._leading.locked()\n",
        (
            "tests/producer/test_interrupts.py::test_a_follower_does_not_end_the_leadership_that_follows_its_own_leaders",
        ),
        "two threads lead, and one of them waits for the other's requests",
    ),
    Defect(
        "drained-sends-stay-open",
        "rocket_sink/producer/driver.py",
        "drives for itself alone.\n            self._drive_to_end(waiter)\n",
        "drives for itself alone.\n                self._drive_to_end(waiter)\n",
        (
            "tests/producer/test_process_end.py::test_a_send_at_the_end_that_another_thread_drains_has_ended_too",
        ),
        "an asynchronous send at the end of a process never ends, and is not sent",
    ),
    Defect(
        "each-producer-has-a-finalizer",
        "rocket_sink/producer/process_end.py",
        "            _registered.add(os.getpid())\n",
        "",
        ("tests/producer/test_process_end.py::test_a_child_registers_its_end_once",),
        "a pool's process that makes many producers keeps something of each",
    ),
    Defect(
        "halves-of-one-id-are-one",
        "rocket_sink/producer/admin/half_commits.py",
        "            by_id.setdefault(half_id, []).append(position)\n",
        "            by_id[half_id] = [position]\n",
        (
            "tests/producer/admin/test_half_commits.py::test_two_halves_of_one_id_are_not_committed_beside_their_message",
        ),
        "consumers get a transactional message twice",
    ),
    Defect(
        "lost-futures-stay-open",
        "rocket_sink/producer/driver.py",
        "        end_all((future, None, _lost()) for future in lost)\n",
        "",
        (
            "tests/producer/test_interrupts.py::test_a_request_that_nobody_knows_any_more_ends_after_its_deadline[send_async]",
        ),
        "a program waits for ever for a send whose request an interrupt has lost",
    ),
    Defect(
        "defects-lose-attempts",
        "rocket_sink/producer/engine/engine.py",
        "                except Exception as error:\n                    # The owner must",
        "                except KeyError as error:\n                    # The owner must",
        (
            "tests/producer/test_interrupts.py::test_an_answer_that_is_not_dealt_with_is_an_unknown_outcome",
        ),
        "the owner of a request waits in vain after an answer that we cannot deal with",
    ),
    Defect(
        "scripts-end-unsent",
        "rocket_sink/producer/process_end.py",
        "atexit.register(finish_all)\n",
        "",
        (
            "tests/producer/test_process_end.py::test_all_that_was_taken_is_sent[last line]",
            "tests/producer/test_process_end.py::test_traces_of_the_last_sends_are_sent",
        ),
        "a script without `close` loses what it sent last, with exit code 0",
    ),
    Defect(
        "children-end-unsent",
        "rocket_sink/producer/process_end.py",
        "            Finalize(None, finish_all, exitpriority=_LAST)\n",
        "            del Finalize\n",
        ("tests/producer/test_process_end.py::test_all_that_was_taken_is_sent[pool]",),
        "processes of a pool lose what they sent last",
    ),
    Defect(
        "dropped-producers-live-on",
        "rocket_sink/producer/producer.py",
        "        session.driver.abandon()\n",
        "",
        (
            "tests/producer/test_process_end.py::test_a_producer_that_is_collected_says_so_and_sends_what_it_took",
        ),
        "each producer that is dropped without `close` leaves a thread and its connections",
    ),
)

LEDGER: tuple[Defect, ...] = (
    Defect(
        "advice-that-cannot-be-pasted",
        "rocket_sink/ledger/report/page.py",
        "text.format(servers=servers)",
        'text.format(servers="HOST:9876")',
        ("tests/ledger/test_render.py",),
        "the next command on the page fails until its HOST is replaced",
    ),
    Defect(
        "vega-without-its-notice",
        "rocket_sink/ledger/report/page.py",
        "script: str = notice + bundle()",
        "script: str = bundle()",
        ("tests/ledger/test_render.py",),
        "who publishes a report breaks the licence of Vega",
    ),
    Defect(
        "commands-that-cannot-be-pasted",
        "rocket_sink/ledger/report/verdict.py",
        'os.environ.get("NAMESRV_ADDR") or "HOST:9876"',
        '"HOST:9876"',
        (
            "tests/ledger/test_report_verdict.py::test_a_command_has_the_name_servers_of_the_environment",
        ),
        "the next command fails until its HOST is replaced",
    ),
    Defect(
        "streams-of-stores-unbuffered",
        "rocket_sink/ledger/spool/stream.py",
        "_CHUNK if is_object_store(filesystem) else None",
        "None",
        (
            "tests/stores/test_short_forms.py::test_a_spool_file_is_written_and_read_by_one_request_each",
        ),
        "a fold asks a store 25 times for each small file",
    ),
    Defect(
        "killed-attempts-of-other-hosts-wait",
        "rocket_sink/ledger/spool/files.py",
        "    if is_over:\n        return True\n",
        "",
        (
            "tests/ledger/test_spool.py::test_another_hosts_file_is_taken_when_its_attempt_does_not_count",
        ),
        "rows that a killed task of another host sent twice are not announced for an hour",
    ),
    Defect(
        "seal-before-the-disk",
        "rocket_sink/ledger/spool/writer.py",
        "        os.fsync(file.fileno())\n        sealed = ",
        "        sealed = ",
        ("tests/ledger/test_spool.py::test_a_seal_is_durable_before_it_is_seen",),
        "a power cut takes the dead letters of a task that has succeeded",
    ),
    Defect(
        "rows-behind-an-end-mark",
        "rocket_sink/ledger/spool/stream.py",
        "    if stream.read(1):\n"
        '        raise pa.ArrowInvalid("bytes follow the end of the stream")\n',
        "",
        ("tests/ledger/test_spool_damage.py::test_rows_behind_an_end_mark_are_not_forgotten",),
        "a fold deletes a spool file of which it has read the first part only",
    ),
    Defect(
        "killed-workers-file-waits",
        "rocket_sink/ledger/spool/files.py",
        "    if alive is not None:\n        return not alive\n",
        "    if alive:\n        return False\n",
        ("tests/ledger/test_spool.py::test_a_killed_workers_rows_are_taken",),
        "the sends of a killed worker are missing from the ledger for an hour",
    ),
    Defect(
        "spools-share-their-numbers",
        "rocket_sink/ledger/fold.py",
        "        if self._spool == self._place:\n            return fold_app_id(ledger_id)\n",
        "        return fold_app_id(ledger_id)\n",
        (
            "tests/integration/test_spark_only.py::test_a_killed_fold_of_the_drivers_folder_is_completed",
        ),
        "a killed fold on one driver's host deletes rows that another host's fold made it think "
        "are in",
    ),
    Defect(
        "handed-rows-dropped",
        "rocket_sink/task/runner.py",
        "            self.handed = self._in_memory.take()\n",
        "            self._in_memory.take()\n",
        (
            "tests/ledger/test_handed.py::test_a_task_that_does_not_reach_the_store_sends_and_hands_over",
        ),
        "rows of tasks that do not reach the ledger's store are in no account",
    ),
    Defect(
        "manifest-unchecked",
        "rocket_sink/ledger/fold.py",
        "            if SPOOL_FILE.fullmatch(name) is None or not name.endswith(SEALED):\n",
        "            if not name:\n",
        ("tests/ledger/test_spool.py::test_a_manifest_that_lists_other_files_is_refused",),
        "a fold deletes whatever files a manifest names",
    ),
    Defect(
        "recovered-files-taken-twice",
        "rocket_sink/ledger/fold.py",
        "        files = [info for info in files if info.path not in folded_paths]\n",
        "",
        (
            "tests/ledger/test_fold.py::test_killed_at_each_step_and_repeated_each_row_is_there_once",
        ),
        "a fold that was killed blocks the ledger: the next one looks for files that are in",
    ),
    Defect(
        "batch-writes-pile-up",
        "rocket_sink/ledger/fold.py",
        "                Path(path).parent.parent.rmdir()\n",
        "",
        ("tests/integration/test_replays.py::test_nothing_stays_of_batch_writes",),
        "each batch write leaves a folder, and folds take longer for ever",
    ),
    Defect(
        "notes-of-tasks-pile-up",
        "rocket_sink/ledger/epoch_starts.py",
        "        NoteStore(place).remove_folder(_tasks_folder(query_id))\n",
        "        _tasks_folder(query_id)\n",
        ("tests/integration/test_replays.py::test_nothing_stays_of_batch_writes",),
        "each batch write leaves a note per task, on object stores one to pay for and to list",
    ),
    Defect(
        "live-lease-taken-over",
        "rocket_sink/ledger/lock.py",
        "            if before is None or before[0] != text:\n",
        "            if before is None:\n",
        (
            "tests/ledger/test_lease.py::test_a_holder_of_another_host_keeps_it_while_it_lives_and_no_longer",
        ),
        "two folds or two backfills work on a ledger at once, and letters are sent twice",
    ),
    Defect(
        "lease-renewed-after-it-was-over",
        "rocket_sink/ledger/lock.py",
        "                self._lost = self._is_over()\n                self._renewed_s = begun_s\n",
        "                self._renewed_s = time.monotonic()\n",
        (
            "tests/ledger/test_lease.py::test_a_holder_that_was_stopped_before_its_write_does_not_take_it_for_renewed",
        ),
        "a holder that was stopped writes over its successor's name, and both work on",
    ),
    Defect(
        "claims-without-a-condition",
        "rocket_sink/ledger/notes.py",
        "        if is_s3(self._place.uri) and keeps_transactions():\n",
        "        if not self._place.uri:\n",
        (
            "tests/stores/test_commits.py::test_first_tasks_with_different_routes_go_by_the_same_queues[True]",
        ),
        "two first tasks keep different queue lists, and keys of a strict query are in two queues",
    ),
    Defect(
        "claims-read-at-once",
        "rocket_sink/ledger/notes.py",
        "        time.sleep(_SETTLE_S)\n",
        "",
        ("tests/ledger/test_notes.py::test_writers_on_a_store_without_conditions_agree",),
        "on a store that ignores conditions two first tasks keep different queue lists",
    ),
    Defect(
        "claim-of-a-removed-note-stays",
        "rocket_sink/ledger/epoch_starts.py",
        "(_write_path(app_id), claimed=True)\n",
        "(_write_path(app_id))\n",
        ("tests/stores/test_commits.py::test_a_note_that_was_removed_can_be_written_again",),
        "each batch write of an appId on a store is taken for one that never ended",
    ),
    Defect(
        "damaged-log-is-left-to-spark",
        "rocket_sink/ledger/append/delta_rs.py",
        "            _refuse_damage(place, error)\n",
        "            pass\n",
        ("tests/ledger/test_damaged_log.py::test_the_files_to_delete_are_named",),
        "sink.write sends everything and then fails in Java's words; who runs it again doubles all",
    ),
    Defect(
        "checkpoint-to-delete-without-a-trial",
        "rocket_sink/ledger/append/delta_rs.py",
        "                with contextlib.suppress(DeltaError):\n"
        "                    DeltaTable(folder)\n",
        "                if count == len(sums):\n",
        (
            "tests/ledger/test_damaged_log.py::test_a_checkpoint_whose_commits_are_gone_is_not_to_be_deleted",
        ),
        "the error advises to delete the only file that knows the older rows",
    ),
    Defect(
        "folders-behind-links-are-entered",
        "rocket_sink/plain_files.py",
        "        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=handle)\n",
        "        return os.open(name, _FOLDER, dir_fd=handle)\n",
        ("tests/test_plain_files.py::test_no_call_goes_through_a_link",),
        "a fold deletes other people's files behind a link in the spool",
    ),
    Defect(
        "pipes-are-opened",
        "rocket_sink/plain_files.py",
        "            if not stat.S_ISREG(os.fstat(opened).st_mode):\n",
        "            if not opened:\n",
        ("tests/test_plain_files.py::test_a_pipe_makes_nobody_wait",),
        "a pipe or a device in a ledger's folder is read as a file of it",
    ),
    Defect(
        "listings-without-a-depth",
        "rocket_sink/plain_files.py",
        "                if depth > 1 and infos[-1].type is fs.FileType.Directory:\n",
        "                if infos[-1].type is fs.FileType.Directory:\n",
        ("tests/test_plain_files.py::test_a_folder_without_end_is_listed_to_a_depth",),
        "folders below each other, as deep as somebody likes, end a driver",
    ),
    Defect(
        "kinds-of-the-log-are-believed",
        "rocket_sink/ledger/append/delta_rs.py",
        "        if kind not in KINDS or _DATA_FILE.fullmatch(name) is None:\n",
        "        if _DATA_FILE.fullmatch(name) is None:\n",
        ("tests/ledger/test_duckdb_reader.py::test_sql_in_a_partition_value_runs_nothing",),
        "SQL in a partition value of the log runs as whoever reads a report",
    ),
    Defect(
        "paths-of-the-log-are-believed",
        "rocket_sink/ledger/append/delta_rs.py",
        "        if kind not in KINDS or _DATA_FILE.fullmatch(name) is None:\n",
        "        if kind not in KINDS:\n",
        ("tests/ledger/test_duckdb_reader.py::test_files_outside_the_ledger_are_not_read",),
        "rows of other ledgers are in a report, and are sent by a backfill",
    ),
    Defect(
        "tables-links-are-unseen",
        "rocket_sink/ledger/append/delta_rs.py",
        "        check_plain(place.root, LOG_FOLDER, *folders)\n",
        "        check_plain(place.root, LOG_FOLDER)\n",
        ("tests/ledger/test_duckdb_reader.py::test_folders_behind_links_are_not_read",),
        "VACUUM deletes files behind a link in the table's folder",
    ),
    Defect(
        "duckdb-opens-all-files",
        "rocket_sink/ledger/duckdb_reader.py",
        '            "SET enable_external_access = false",\n',
        "",
        ("tests/ledger/test_duckdb_reader.py::test_a_session_reads_the_ledgers_files_only",),
        "a text that gets into a query reads and writes the files of the host",
    ),
    Defect(
        "duckdb-spills-into-a-guessed-folder",
        "rocket_sink/ledger/duckdb_reader.py",
        '            "temp_directory": self._scratch.name,\n',
        '            "temp_directory": f"{tempfile.gettempdir()}/rocket-sink-{os.getpid()}",\n',
        ("tests/ledger/test_duckdb_reader.py::test_what_does_not_fit_into_memory_is_private",),
        "other users of the host read dead letters' bodies, and truncate files by links",
    ),
    Defect(
        "each-query-opens-all-files",
        "rocket_sink/ledger/duckdb_reader.py",
        "            if self._queries == 2 and self._files:\n",
        "            if self._queries == 0 and self._files:\n",
        ("tests/ledger/test_report_scale.py::test_the_files_of_many_folds_are_opened_once",),
        "a report after eight hours of streaming takes minutes",
    ),
    Defect(
        "pages-commands-are-unquoted",
        "rocket_sink/ledger/report/page.js",
        "  if (/^[\\w.-]+$/.test(text)) return",
        "  if (text) return",
        ("tests/ledger/test_report_page.py::test_hostile_texts_stay_texts",),
        "a command pasted from a report runs what somebody wrote into an appId",
    ),
    Defect(
        "note-before-the-disk",
        "rocket_sink/plain_files.py",
        "            file.flush()\n            os.fsync(file.fileno())\n",
        "            file.flush()\n",
        ("tests/ledger/test_spool.py::test_a_small_file_is_durable_before_it_is_seen",),
        "after a power cut the note of a query's queues or held keys is an empty file",
    ),
    Defect(
        "deleted-checkpoints-are-well",
        "rocket_sink/ledger/report/queries.py",
        "a.last_at < b.first_at",
        "a.last_at < a.first_at",
        (
            "tests/ledger/test_report_queries.py::test_a_query_whose_checkpoint_may_have_been_deleted_is_told",
        ),
        "all rows were sent again after a checkpoint was deleted, and the report says all is well",
    ),
    Defect(
        "killed-attempts-sent-nothing",
        "rocket_sink/ledger/views.py",
        "            SELECT k.query_id, k.epoch, k.perhaps_stored FROM killed_attempts k\n",
        "            SELECT k.query_id, k.epoch, 0 FROM killed_attempts k\n",
        ("tests/task/test_killed_attempts.py::test_all_that_is_stored_twice_is_announced",),
        "messages are there twice, and the ledger announces none",
    ),
    Defect(
        "letters-of-superseded-attempts",
        "rocket_sink/ledger/views.py",
        "        SEMI JOIN (SELECT * FROM accounts WHERE counts) a ON",
        "        SEMI JOIN accounts a ON",
        (
            "tests/ledger/test_ledger.py::test_of_a_retried_partition_the_last_complete_attempt_counts",
        ),
        "a backfill sends rows that the retried task has sent already",
    ),
    Defect(
        "other-queries-overtake",
        "rocket_sink/ledger/pending_keys.py",
        "                if note.query == query and note.epoch >= ctx.epoch:\n",
        "                if note.epoch >= ctx.epoch:\n",
        (
            "tests/task/test_pending_keys.py::test_other_queries_wait_and_the_own_epochs_next_attempt_does_not",
        ),
        "rows of another query overtake the pending letters of their key",
    ),
    Defect(
        "remark-unmasked",
        "rocket_sink/ledger/records.py",
        '    values["remark"] = [storable(a.remark, secrets=secrets) for a in attempts]\n',
        '    values["remark"] = [storable(a.remark) for a in attempts]\n',
        ("tests/ledger/test_records.py::test_remarks_are_cleaned_and_secrets_masked",),
        "a secret that a broker repeats in its remark is in the ledger's table",
    ),
    Defect(
        "a-broker-of-the-scope-only",
        "rocket_sink/ledger/report/queries.py",
        "            FROM pending_letters WHERE sharding_key IS NOT NULL AND reason <> 'data'\n",
        "            FROM pending_letters WHERE sharding_key IS NOT NULL AND reason <> 'data'\n"
        "                AND {read.where}\n",
        (
            "tests/ledger/test_report_page.py::test_the_broker_is_named_when_it_went_before_the_reports_time",
        ),
        "the report of the last hour does not say that rows wait for a broker that died before it",
    ),
    Defect(
        "outages-are-one",
        "rocket_sink/ledger/report/queries.py",
        "            SELECT *, sum(CASE WHEN stored_at > failed_at\n",
        "            SELECT *, sum(CASE WHEN back_at < failed_at\n",
        ("tests/ledger/test_report_queries.py::test_two_outages_are_two",),
        "two outages of half a minute are one of many minutes in the report",
    ),
    Defect(
        "penalties-added",
        "rocket_sink/ledger/report/queries.py",
        "sum(greatest(ends_us - greatest(start_us, earlier_us), 0)) / 1000 AS length_ms",
        "sum(ends_us - start_us) / 1000 AS length_ms",
        ("tests/ledger/test_report_queries.py::test_penalties_that_overlap_are_one_isolation",),
        "a broker that was isolated for a minute was isolated for five, says the report",
    ),
    Defect(
        "spool-not-looked-at",
        "rocket_sink/ledger/views.py",
        "    return f\"{_rows(kind)} OR kind = '{UNFOLDED[kind]}'\"\n",
        "    return _rows(kind)\n",
        (
            "tests/ledger/test_report_queries.py::test_a_broker_that_died_since_the_last_fold_is_named",
            "tests/commands/test_topic_types.py::test_a_broker_that_left_the_route_is_named",
        ),
        "a broker has been dead for a minute, and the report says that all is well",
    ),
    Defect(
        "long-ids-cut",
        "rocket_sink/ledger/path.py",
        "    if len(part) <= _PART_LENGTH:\n        return part\n",
        "    if len(part) <= 10_000:\n        return part[:_PART_LENGTH]\n",
        (
            "tests/ledger/test_path.py::test_long_ids_that_differ_at_their_end_have_files_of_their_own",
        ),
        "two writes of one long appId share what their tasks noted",
    ),
    Defect(
        "letters-of-failed-sends",
        "rocket_sink/ledger/views.py",
        "    OR (coalesce(lane, '') = 'table' AND query_id <> 'local'))",
        "    OR false)",
        (
            "tests/ledger/test_report_queries.py::test_letters_of_a_table_send_that_failed_do_not_count",
        ),
        "a backfill doubles rows of a table that was sent again",
    ),
    Defect(
        "second-write-skipped",
        "rocket_sink/spark/foreach_batch.py",
        "        if _written.get((place, query)) == (run, epoch):\n",
        "        if False:\n",
        ("tests/spark/test_two_writes.py::test_what_counts_as_the_second_write_of_an_epoch",),
        "of two sinks in one function of a stream the second sends nothing, without a word",
    ),
    Defect(
        "rows-handed-over-twice",
        "rocket_sink/spark/datasource.py",
        "        # Before any row is kept: Spark calls `abort` after an error, which keeps them.\n",
        "        self._keep_handed(done)\n",
        ("tests/spark/test_budget.py::test_rows_that_tasks_hand_over_are_kept_once",),
        "a write over its budget has each of its rows twice in the ledger",
    ),
    Defect(
        "table-made-twice",
        "rocket_sink/ledger/append/delta_rs.py",
        "            commit_properties=CommitProperties(max_commit_retries=0),\n",
        "",
        ("tests/ledger/test_making.py::test_of_tables_that_are_made_at_once_one_is_made",),
        "two queries that start at once on a new ledger have an id each for it",
    ),
    Defect(
        "live-process-keeps-a-lost-lease",
        "rocket_sink/ledger/lock.py",
        "        if alive is False:\n            return True\n",
        "        if alive is not None:\n            return not alive\n",
        (
            "tests/ledger/test_lease.py::test_what_a_live_process_could_not_give_up_is_taken_after_its_lease",
        ),
        "after a moment without its store a driver folds nothing more, for days",
    ),
    Defect(
        "dead-fold-behind-a-hundred-commits",
        "rocket_sink/ledger/append/delta_rs.py",
        "    for version in range(table.version(), since, -1):\n",
        "    for version in range(table.version(), max(since, table.version() - 100), -1):\n",
        ("tests/stores/test_commits.py::test_a_fold_that_died_is_looked_for_in_all_later_commits",),
        "the rows of a fold that died are said to be safe, and folded once more",
    ),
    Defect(
        "keys-of-unfolded-letters",
        "rocket_sink/ledger/pending_keys.py",
        "        return not is_left and self._last",
        "        return self._last",
        ("tests/ledger/test_pending_keys.py::test_keys_of_a_file_that_is_not_folded_yet_are_held",),
        "rows of a key overtake its dead letter, which a fold could not read",
    ),
    Defect(
        "lost-answer-doubles-rows",
        "rocket_sink/ledger/spool/writer.py",
        "            if not (whole_at_once and _is_there(remote, sealed)):\n",
        "            if True:\n",
        ("tests/ledger/test_handed.py::test_rows_whose_upload_has_no_answer_are_in_one_spool",),
        "a task's accounts and dead letters are in the ledger twice",
    ),
)

ROWS: tuple[Defect, ...] = (
    Defect(
        "delays-overflow-in-columns",
        "rocket_sink/rows/checks.py",
        "    if batch.delay_ms is not None:\n",
        "    if batch.delay_ms is not None and batch.delay_level is not None:\n",
        ("tests/rows/test_checks.py::test_each_rule_has_its_code",),
        "a row that is due in millions of years is delivered at once",
    ),
    Defect(
        "system-topics-in-any-case",
        "rocket_sink/message_rules.py",
        '"^(?i:rmq_sys_)|',
        '"^(?:rmq_sys_)|',
        ("tests/wire/test_message_rules.py", "tests/rows/test_checks.py"),
        "a row's topic is RMQ_SYS_..., and brokers take the row for a message of their own",
    ),
    Defect(
        "topics-of-hosts-are-users",
        "rocket_sink/routing/topic_publish_info.py",
        "topic in (broker.name, broker.cluster)",
        "topic == broker.name",
        ("tests/task/test_task.py",),
        "a row's topic is the cluster's name, and the row is stored where nobody looks",
    ),
    Defect(
        "whitespace-is-a-key",
        "rocket_sink/rows/checks.py",
        "    mask = nulls_of(keys) | all_blank(keys)\n",
        "    mask = nulls_of(keys) | empty(keys)\n",
        ("tests/producer/engine/test_topic_policies.py",),
        "a row whose key is a tab is lost in a compaction topic",
    ),
    Defect(
        "blank-tags-pass",
        "rocket_sink/rows/checks.py",
        "        yield _suspect_texts(batch.tags) | all_blank(batch.tags)\n",
        "        yield _suspect_texts(batch.tags)\n",
        ("tests/rows/test_checks.py::test_each_rule_has_its_code",),
        "a row that Message refuses is sent, and its tag is lost on the way",
    ),
    Defect(
        "sliced-text-accuses-others",
        "rocket_sink/rows/checks.py",
        "np.searchsorted(offsets - offsets[0], positions",
        "np.searchsorted(offsets, positions",
        ("tests/rows/test_checks.py::test_screens_pass_nothing_that_a_message_refuses",),
        "in a sliced batch a bad row passes and a good one is looked at in its place",
    ),
    Defect(
        "sorter-forgets-the-rest",
        "rocket_sink/rows/sort.py",
        "        self._spill()\n        while len(self._runs) > _RUNS:\n",
        "        while len(self._runs) > _RUNS:\n",
        ("tests/task/test_task.py::TestOrderBy",),
        "rows that came after the last spill of a sorted task are never sent",
    ),
    Defect(
        "sorter-merges-whole-runs",
        "rocket_sink/rows/sort.py",
        "        while not self.is_read and 2 * len(self.rows) < self._block_rows:\n",
        "        while not self.is_read:\n",
        ("tests/rows/test_sort.py::test_memory_stays_bounded_whatever_the_keys",),
        "a task that sorts rows without a key takes all of its worker's memory",
    ),
    Defect(
        "sorter-overtakes-files",
        "rocket_sink/rows/sort.py",
        "        count = int(min(lasts)) + 1 if lasts else len(order)\n",
        "        count = int(max(lasts)) + 1 if lasts else len(order)\n",
        ("tests/rows/test_sort.py::test_equal_values_keep_their_order",),
        "rows of a large task go before rows that sort before them",
    ),
    Defect(
        "skipped-hour-overtakes",
        "rocket_sink/rows/row_batcher.py",
        "        if (skipped := _local(seconds) - written) > 0:\n",
        "        if (skipped := written - _local(seconds)) > 0:\n",
        (
            "tests/rows/test_row_batcher.py::test_times_without_a_zone_are_sorted_as_they_are_written",
        ),
        "foreach sends rows that are ordered by a TIMESTAMP_NTZ in the order of the worker's zone",
    ),
    Defect(
        "large-bodies-unweighed",
        "rocket_sink/rows/row_batcher.py",
        "        return self._seen >= self._limit or self._size >= GATHER_BYTES\n",
        "        return self._seen >= self._limit\n",
        ("tests/rows/test_row_batcher.py::TestPile::test_large_ones_are_weighed",),
        "a foreach task with large bodies takes all of its worker's memory",
    ),
    Defect(
        "first-property-wins",
        "rocket_sink/rows/normalise.py",
        "        values.take(pa.array(last[order])),\n",
        "        values.take(pa.array(first[order])),\n",
        (
            "tests/rows/test_contract.py::test_of_a_repeated_property_the_first_place_and_the_last_value_stay",
        ),
        "a repeated header carries another value than in the row's Message",
    ),
)

TASK: tuple[Defect, ...] = (
    Defect(
        "lost-rows-balance",
        "rocket_sink/task/totals.py",
        "        if summary.rows_in != summary.accounted:\n",
        "        if summary.rows_in < summary.accounted:\n",
        (
            "tests/task/test_task.py::TestFailures::test_a_row_that_is_lost_on_the_way_fails_the_task",
        ),
        "a task that lost rows succeeds",
    ),
    Defect(
        "parts-in-reverse",
        "rocket_sink/task/ordering.py",
        "        lane.waiting.extendleft(reversed(list(again)))\n",
        "        lane.waiting.extendleft(again)\n",
        (
            "tests/task/test_task.py::TestOrder::test_later_rows_of_a_key_given_up_are_held_back_in_order",
        ),
        "the messages of a batch that was parted are stored in reverse",
    ),
    Defect(
        "unknown-counted-as-dead",
        "rocket_sink/task/dead_letters.py",
        "        outcome = Outcome.UNKNOWN if request.maybe_duplicate else completion.outcome\n",
        "        outcome = completion.outcome\n",
        (
            "tests/task/test_task.py::TestFailures::test_what_may_be_stored_stays_unknown_when_it_is_refused_later",
        ),
        "rows that may be stored are counted as not sent, and a backfill does not ask for them",
    ),
    Defect(
        "equal-batches-share-ids",
        "rocket_sink/task/message_ids.py",
        "        self._state = digest = state.digest()\n",
        "        digest = state.digest()\n",
        ("tests/task/test_task_ids.py::test_the_same_rows_get_the_same_ids_and_no_two_share_one",),
        "equal rows of two batches share one id, and readers drop one as a duplicate",
    ),
    Defect(
        "equal-rows-share-ids",
        "rocket_sink/task/message_ids.py",
        "        self._keep(ranked)\n",
        "",
        ("tests/task/test_content_ids.py::test_ids_depend_neither_on_order_nor_on_batches",),
        "of two equal rows in two batches a replay takes the second for stored: it is lost",
    ),
    Defect(
        "keys-go-on-after-a-loss",
        "rocket_sink/task/dead_letters.py",
        "        self._held.setdefault(request.topic, set()).update(keys)\n",
        "",
        (
            "tests/task/test_task.py::TestOrder::test_later_rows_of_a_key_given_up_are_held_back_in_order",
        ),
        "later rows of a key overtake the one that was given up",
    ),
    Defect(
        "changed-queues-pass",
        "rocket_sink/task/queue_snapshot.py",
        "        if name in counts and counts[name] != count\n",
        "        if name in counts and counts[name] < count\n",
        ("tests/task/test_task.py::TestStrict::test_a_changed_route_is_refused",),
        "keys of a strict query move when their topic gets more queues",
    ),
    Defect(
        "held-for-no-broker",
        "rocket_sink/task/dead_letters.py",
        '"broker_name", None) or self._home(request),\n',
        '"broker_name", None),\n',
        (
            "tests/task/test_task.py::TestStrict::test_a_report_can_say_which_broker_keys_without_an_attempt_wait_for",
        ),
        "the report leaves out rows that wait for a dead broker because their queue is closed",
    ),
    Defect(
        "doubtful-rows-held-back",
        "rocket_sink/task/dead_letters.py",
        "        if request.maybe_duplicate and request.first_error is not None:\n",
        "        if request.first_error is None:\n",
        (
            "tests/task/test_order_of_kinds.py::test_rows_of_a_batch_that_may_be_stored_are_not_said_to_be_held_back",
        ),
        "rows that are stored are said not to be, and a backfill doubles them",
    ),
)

SPARK: tuple[Defect, ...] = (
    Defect(
        "one-task-reads-all-letters",
        "rocket_sink/spark/backfill/sources.py",
        '        letters = letters.join(F.broadcast(queries), is_of_query).drop("_query")\n',
        "        from pyspark.sql import Window\n\n"
        '        over = Window.partitionBy("query_id")\n'
        '        letters = letters.withColumn("_query_order", F.min(F.expr(ORDER)).over(over))\n',
        (f"{_backfill}::TestDeadLetters::test_bodies_of_a_query_are_read_by_several_tasks",),
        "a backfill of 300,000 letters of 10 KB plans for eight minutes in one task that spills",
    ),
    Defect(
        "types-are-not-compared",
        "rocket_sink/spark/backfill/sources.py",
        "        if before is None or before == now:\n",
        "        if before is None or before.keys() == now.keys():\n",
        (
            f"{_backfill}::TestTables::test_rows_that_spark_reads_with_other_types_are_not_sent_again",
        ),
        "one new folder makes a backfill send all old rows again",
    ),
    Defect(
        "zone-of-texts-ignored",
        "rocket_sink/spark/backfill/sources.py",
        "            if self.is_text or any(",
        "            if any(",
        (f"{_backfill}::TestTables::test_texts_are_other_times_in_another_zone",),
        "a backfill of csv files on a host in another zone sends all rows again",
    ),
    Defect(
        "data-source-speculates",
        "rocket_sink/spark/datasource.py",
        "        refuse_speculation(options, is_on=self.speculates)\n",
        "",
        (
            "tests/spark/test_sink.py::TestSpeculation::test_the_data_source_judges_each_write_of_a_session_that_speculates[writer]",
        ),
        "two copies of a slow task both send their rows, and nobody was asked",
    ),
    Defect(
        "tasks-that-told-nothing",
        "rocket_sink/spark/datasource.py",
        "        if silent := len(messages) - len(done):\n",
        "        if silent := len(messages) * (not messages):\n",
        ("tests/spark/test_budget.py::test_a_write_whose_tasks_have_told_nothing_is_not_done",),
        "an epoch whose rows Spark gave to no task is committed, and its rows are lost in silence",
    ),
    Defect(
        "continuous-trigger-runs",
        "rocket_sink/spark/listener.py",
        "            refuse_query(session, str(event.id), folder.ledgers)\n",
        "",
        (
            "tests/spark/test_listener.py::test_a_continuous_trigger_is_refused_before_an_epoch_is_done",
        ),
        "a query with a continuous trigger sends nothing and says nothing",
    ),
    Defect(
        "killed-attempts-of-no-record",
        "rocket_sink/task/runner.py",
        "self._again or (repeated and not self._spool)",
        "self._again",
        ("tests/task/test_killed_attempts.py::test_without_a_spool_the_next_attempt_doubts_all",),
        "what a killed attempt sent is doubled without a word where it leaves no record",
    ),
    Defect(
        "scheduler-waits-for-the-store",
        "rocket_sink/spark/foreach_task.py",
        "rows[0], in_store=False)",
        "rows[0])",
        ("tests/ledger/test_handed.py::test_foreach_rows_wait_for_no_store",),
        "while a store is slow, no task of any job of the application ends",
    ),
    Defect(
        "ledger-inside-the-input",
        "rocket_sink/spark/session_checks.py",
        "    is_inside = len(pattern) <= len(place) and",
        "    is_inside = len(pattern) == len(place) and",
        ("tests/spark/test_listener.py::test_a_ledger_or_checkpoint_inside_the_input_is_refused",),
        "the next query reads the ledger's own files, and sends them",
    ),
    Defect(
        "close-does-not-wait",
        "rocket_sink/spark/foreach_task.py",
        "            self._flush()\n            self._run.finish()\n",
        "            self._flush()\n            self._run.drive()\n",
        ("tests/spark/test_sink.py::TestForeach::test_all_rows_are_stored_when_close_returns",),
        "a foreach task succeeds before its rows are answered for",
    ),
    Defect(
        "flush-thread-keeps-its-error",
        "rocket_sink/spark/foreach_task.py",
        "                    self._pile.look_at = 0\n",
        "",
        (
            (
                "tests/spark/test_foreach_task.py::TestErrors::"
                "test_also_when_it_came_before_the_rows_were_taken"
            ),
        ),
        "a task goes on taking rows of which none is sent any more",
    ),
    Defect(
        "flush-thread-reads-no-answers",
        "rocket_sink/spark/foreach_task.py",
        "time.monotonic() + _ANSWERS_S if more else math.inf",
        "math.inf",
        ("tests/spark/test_foreach_task.py::test_answers_are_read_while_spark_is_silent",),
        "while Spark is silent no request is tried again, and none goes on to the next of its key",
    ),
    Defect(
        "buffer-cleared-beside-the-appending-thread",
        "rocket_sink/rows/row_batcher.py",
        "        del self.rows[: len(rows)]\n",
        "        self.rows.clear()\n",
        ("tests/rows/test_row_batcher.py::TestPile::test_what_comes_while_a_batch_is_made_stays",),
        "a row that comes while the flush thread makes a batch is lost",
    ),
    Defect(
        "ids-by-batch-where-the-clock-cuts",
        "rocket_sink/task/message_ids.py",
        "if timed else TaskIds",
        "if not timed else TaskIds",
        ("tests/spark/test_foreach_task.py::test_an_attempt_with_other_pauses_gives_the_same_ids",),
        "copies of a row that a replay sent again do not share one id",
    ),
    Defect(
        "end-time-inclusive",
        "rocket_sink/spark/reader.py",
        "message.store_ms < self.to_ms",
        "message.store_ms <= self.to_ms",
        ("tests/spark/test_reader.py::test_offsets_and_times",),
        "two reads of adjoining times both give the message between them",
    ),
    Defect(
        "backfills-name-no-letter",
        "rocket_sink/spark/backfill/resend.py",
        '            self.total.add_failures({number: f"{failure.code}: {failure.text}"})\n',
        "",
        ("tests/spark/backfill/test_resend.py",),
        "backfill --json says how many letters failed, and not which",
    ),
    Defect(
        "resends-name-no-letter",
        "rocket_sink/producer/admin/dlq.py",
        "        if len(report.failures) < FAILURES_MAX:\n",
        "        if len(report.failures) > FAILURES_MAX:\n",
        ("tests/commands/test_dlq.py",),
        "dlq resend --json says how many letters failed, and not which",
    ),
    Defect(
        "failed-letter-is-overtaken",
        "rocket_sink/spark/backfill/resend.py",
        '        failures = [self._failed[number] for number in chunk["message_id"].to_pylist()]\n'
        "        self._stop_keys(chunk)\n",
        '        failures = [self._failed[number] for number in chunk["message_id"].to_pylist()]\n',
        (
            "tests/spark/backfill/test_resend.py::test_a_refused_letter_stays_pending_and_stops_its_key",
        ),
        "a backfill stores later letters of a key before the one that failed",
    ),
    Defect(
        "retried-task-asks-nobody",
        "rocket_sink/spark/backfill/resend.py",
        "        if self._ask_all:\n",
        "        if False:\n",
        (
            "tests/spark/backfill/test_resend.py::TestWhatMayBeStored::test_a_task_that_runs_again_asks_for_all",
        ),
        "a backfill's task that Spark runs again sends its letters twice",
    ),
    Defect(
        "marks-left-to-the-kernel",
        "rocket_sink/spark/backfill/resend.py",
        "        self._spool.append(about_to_send(_names(chunk), self._ctx))\n"
        "        self._spool.sync()\n",
        "        self._spool.append(about_to_send(_names(chunk), self._ctx))\n",
        ("tests/spark/backfill/test_resend.py::test_resolutions_are_durable_chunk_by_chunk",),
        "after a crash of the machine no mark says which letters were sent: they go twice",
    ),
    Defect(
        "filters-run-java",
        "rocket_sink/spark/backfill/sources.py",
        "    if _BEYOND_THE_ROW.search(tree):\n",
        "    if not tree:\n",
        (
            "tests/spark/backfill/test_backfill.py::TestDeadLetters::test_a_filter_calls_no_java_and_asks_no_other_table",
        ),
        "a filter that somebody passed on runs Java in the operator's driver",
    ),
    Defect(
        "tired-letter-is-overtaken",
        "rocket_sink/spark/backfill/sources.py",
        '    return candidates.withColumn("_chosen", going & ~F.col("_behind")).drop("_wanted")\n',
        '    return candidates.withColumn("_chosen", going).drop("_wanted")\n',
        (
            "tests/spark/backfill/test_backfill.py::TestDeadLetters::test_tries_killed_backfills_and_parked_letters",
        ),
        "letters of a key are sent while an earlier one that failed three times is left alone",
    ),
    Defect(
        "stores-that-ignore-conditions-are-trusted",
        "rocket_sink/ledger/append/exclusive.py",
        "            return _ask(spark, place, _refuses_on_condition)\n",
        "            return _ask(spark, place, _refuses_on_condition) or True\n",
        ("tests/stores/test_short_forms.py::test_what_users_do_with_a_ledger_on_s3[lanes]",),
        "two drivers overwrite each other's commits on a store that ignores If-None-Match",
    ),
    Defect(
        "a-denied-look-settles-who-commits",
        "rocket_sink/ledger/append/exclusive.py",
        "            if not _may_pass(spark, error):\n",
        "            if not _may_pass(spark, error) or pause_s:\n",
        ("tests/ledger/test_exclusive.py::test_a_store_is_asked_again_after_a_denied_look",),
        "after a denied request Spark's Delta commits for days, and overwrites other drivers",
    ),
    Defect(
        "executors-out-of-reach-for-ever",
        "rocket_sink/ledger/table.py",
        "                _not_before_s[key] = time.monotonic() + _LOOK_AGAIN_S\n",
        "                _allowed[key] = False\n",
        ("tests/ledger/test_shared.py::test_spark_commits_on_a_store_that_executors_do_not_reach",),
        "after a moment without the store Spark's Delta commits for the application's life",
    ),
    Defect(
        "commits-after-a-deleted-log",
        "rocket_sink/ledger/append/delta_rs.py",
        '    looked_at.append(f"{LOG_FOLDER}/{table.version():020}.json")\n',
        "",
        ("tests/ledger/test_damaged_log.py::test_no_commit_begins_the_log_of_a_deleted_ledger",),
        "a ledger that was deleted during an epoch ends as a log that nobody can read",
    ),
    Defect(
        "deleted-ledger-is-made-by-spark",
        "rocket_sink/ledger/append/appender.py",
        "            if not is_table(spark, place):\n",
        "            if not place.uri:\n",
        ("tests/ledger/test_damaged_log.py::test_a_ledger_that_was_deleted_between_epochs",),
        "a ledger that was deleted between epochs is made anew without its partitions",
    ),
    Defect(
        "spools-into-another-delta-table",
        "rocket_sink/ledger/table.py",
        "            _refuse_foreign(place)\n",
        "            pass\n",
        (
            "tests/ledger/test_shared.py::test_another_delta_table_is_refused_before_a_file_is_written_there",
        ),
        "a query sends everything and puts its spool into a table of other data",
    ),
    Defect(
        "session-without-delta-is-a-damaged-table",
        "rocket_sink/ledger/table.py",
        "        if wrong is not None:\n",
        "        if wrong is None and before:\n",
        (
            "tests/ledger/test_shared.py::test_a_session_that_cannot_read_the_table_is_told_from_a_damaged_table",
        ),
        "a session without Delta's settings is told to restore the ledger from a backup",
    ),
    Defect(
        "a-lost-answer-is-a-failed-commit",
        "rocket_sink/ledger/append/delta_rs.py",
        "            if _names(newer, files):\n",
        "            if False:\n",
        ("tests/stores/test_commits.py::test_a_commit_whose_answer_is_lost_is_in_once",),
        "an epoch that the ledger has fails, and its query with it",
    ),
    Defect(
        "executors-off-the-store-write-files",
        "rocket_sink/ledger/table.py",
        "            if not is_exclusive or _is_reached(spark, place):\n",
        "            if not is_exclusive or True:\n",
        ("tests/ledger/test_shared.py::test_spark_commits_on_a_store_that_executors_do_not_reach",),
        "tasks send their rows, cannot write the ledger's files, and send the rows again",
    ),
    Defect(
        "sparks-delta-commits-while-the-store-is-away",
        "rocket_sink/ledger/table.py",
        "    return open_table(place, must=True) if _may_commit(spark, place) else None\n",
        "    return open_table(place) if _may_commit(spark, place) else None\n",
        ("tests/ledger/test_shared.py::test_spark_commits_on_a_store_that_executors_do_not_reach",),
        "after a moment without the store, Spark's Delta overwrites a commit of another driver",
    ),
    Defect(
        "a-dead-writes-rows-are-not-asked-for",
        "rocket_sink/spark/foreach_batch.py",
        '        query = f"{options.app_id}/{write}"\n',
        '        query = f"{options.app_id}/{run}"\n',
        (
            "tests/integration/test_replays.py::test_a_batch_write_that_died_is_asked_for_by_its_app_id",
        ),
        "a batch write under the appId of one that died doubles what that one sent",
    ),
    Defect(
        "a-failed-writes-notes-go",
        "rocket_sink/spark/datasource.py",
        "        if well or not options.app_id:\n",
        "        if True:\n",
        ("tests/integration/test_replays.py::test_a_batch_that_failed_is_asked_for_by_its_app_id",),
        "a batch write of the data source doubles what the failed one before it has sent",
    ),
    Defect(
        "refused-half-is-a-member",
        "rocket_sink/spark/decided_epoch.py",
        'pc.and_(pc.fill_null(rows.column("half"), False), is_stored)',
        'pc.fill_null(rows.column("half"), False)',
        (
            "tests/spark/test_transactional_epochs.py::test_delta_rs_and_spark_read_the_same_of_an_epoch",
        ),
        "an epoch commits half messages that no broker has, and reports them as lost",
    ),
    Defect(
        "commits-unanswered-are-taken-for-done",
        "rocket_sink/producer/admin/half_commits.py",
        "            self._committer.ended(self._lane, position, None, error)\n",
        "            self._committer.committed(self._lane, 1)\n",
        ("tests/producer/admin/test_half_commits.py::test_what_has_no_answer_is_committed_again",),
        "half messages whose commit was lost on its way stay hidden, and the ledger says committed",
    ),
    Defect(
        "commits-without-a-look-at-the-lock",
        "rocket_sink/spark/transactions.py",
        "                check=lock.check,\n",
        "",
        (
            "tests/spark/test_transactional_epochs.py::test_an_epoch_is_ended_under_a_live_lock_alone",
        ),
        "a driver that was stopped commits beside its successor: messages are visible twice",
    ),
    Defect(
        "lots-of-commits-after-the-lock-is-lost",
        "rocket_sink/producer/admin/half_commits.py",
        "        self._check_lock(self._request_s)\n",
        "",
        (
            "tests/spark/test_transactional.py::test_a_committer_without_its_lock_writes_nothing_that_still_waits",
        ),
        "requests are still on their way when a successor looks what is visible",
    ),
    Defect(
        "lost-lock-and-the-queue-is-written",
        "rocket_sink/producer/admin/half_commits.py",
        "            self._engine.abandon()\n            raise\n",
        "            raise\n",
        (
            "tests/spark/test_transactional.py::test_a_committer_without_its_lock_writes_nothing_that_still_waits",
        ),
        "thousands of queued commits are written while the engine is closed, and doubled",
    ),
    Defect(
        "unwritten-note-fails-the-epoch",
        "rocket_sink/spark/datasource.py",
        "            # The rows are sent, and a failed commit would send them again.\n",
        "            raise\n",
        (
            "tests/spark/test_budget.py::test_an_epoch_whose_note_cannot_be_written_is_done_all_the_same",
        ),
        "a full disk at the end of an epoch ends the query, whose restart sends the epoch again",
    ),
    Defect(
        "all-attempts-go-to-the-driver",
        "rocket_sink/ledger/pending_keys.py",
        '            F.max("epoch").alias("last"), F.collect_list(F.when(is_asked, attempt))',
        '            F.max("epoch").alias("last"), F.collect_list(attempt)',
        (
            "tests/ledger/test_pending_keys.py::test_the_driver_gets_the_attempts_that_hold_keys_alone",
        ),
        "while one key is held each fold brings 700,000 attempts to the driver: 1 GB, 39 s",
    ),
    Defect(
        "unfolded-in-silence",
        "rocket_sink/spark/datasource.py",
        "        folded = not options.ledger or options.ledger in self.folded\n",
        "        folded = not options.ledger or bool(self.folded)\n",
        (
            "tests/spark/test_listener.py::test_a_stream_into_a_ledger_that_is_not_folded_says_so_once",
        ),
        "the spool of a stream grows for weeks, and its dead letters are in no view",
    ),
    Defect(
        "folds-keep-ends-waiting",
        "rocket_sink/spark/listener.py",
        "                self._confirm_new()\n",
        "                if place == min(places, key=str):\n"
        "                    self._confirm_new()\n",
        ("tests/spark/test_listener.py::test_an_epoch_is_noted_between_the_folds_of_two_ledgers",),
        "a sync after a query, in a session with many ledgers, does not know its last epoch done",
    ),
    Defect(
        "folds-crash-the-end",
        "rocket_sink/spark/listener.py",
        "            self._thread.join(_END_S)\n",
        "            pass\n",
        (
            "tests/spark/test_listener.py::test_the_end_of_python_waits_for_the_fold_that_is_under_way",
        ),
        "a script that ends while the ledger is folded ends by SIGSEGV",
    ),
    Defect(
        "writes-replace-each-other",
        "rocket_sink/spark/datasource.py",
        '        return f"{options.app_id}/{run}"\n',
        '        return ""\n',
        ("tests/spark/test_context.py::test_each_batch_write_of_an_app_id_is_a_query_of_its_own",),
        "dead letters of a batch write are gone after the next one of its appId",
    ),
    Defect(
        "letters-with-anothers-id",
        "rocket_sink/spark/backfill/resend.py",
        '        is_found = pc.and_(_in(chunk["message_id"], stored_ids), doubtful)\n',
        '        is_found = _in(chunk["message_id"], stored_ids)\n',
        (
            "tests/spark/backfill/test_resend.py::test_of_two_letters_with_one_id_that_which_was_never_sent_is_sent",
        ),
        "a dead letter that was never sent counts as resent",
    ),
    Defect(
        "consumers-letters-asked-for",
        "rocket_sink/spark/backfill/resend.py",
        '            doubtful = pc.invert(chunk["was_stored"])\n',
        '            doubtful = pc.is_valid(chunk["letter_id"])\n',
        (
            "tests/spark/backfill/test_resend.py::TestWhatAConsumerGaveUp::test_is_sent_by_a_task_that_runs_again",
        ),
        "what a consumer gave up is noted as sent again, and never was",
    ),
)

COMMANDS: tuple[Defect, ...] = (
    Defect(
        "replication-port-on-all-interfaces",
        "rocket_sink/cluster/layout.py",
        "        write_loopback_classes(jars, loopback)\n",
        "",
        ("tests/cluster/test_cluster_live.py::test_no_process_listens_beyond_loopback",),
        "whoever reaches the machine reads all messages of a local cluster, without a password",
    ),
    Defect(
        "a-long-step-in-silence",
        "rocket_sink/commands/common/output.py",
        "    reminder.start()\n",
        "    reminder.run = lambda: None\n    reminder.start()\n",
        ("tests/commands/test_output.py::test_a_long_step_says_that_it_goes_on",),
        "a backfill that reads for minutes looks as if it hung",
    ),
    Defect(
        "cached-jars-are-believed",
        "rocket_sink/cluster/jars.py",
        "    are_right = all(map(Artifact.matches, artifacts, paths))\n",
        "    are_right = all(path.is_file() for path in paths)\n",
        ("tests/cluster/test_jars.py::test_a_jar_that_was_changed_in_the_cache_is_fetched_again",),
        "a jar that somebody changed in the cache runs as the user",
    ),
    Defect(
        "secrets-in-ps-are-unsaid",
        "rocket_sink/commands/common/sink_input.py",
        "            if option.kind is Kind.SECRET and not text.startswith(REFERENCES):\n",
        "            if not option.kind:\n",
        (
            "tests/commands/test_sink_input.py::test_a_secret_that_everybody_sees_in_ps_is_warned_of",
        ),
        "a secret key stands in ps and in the shell's history without a word",
    ),
    Defect(
        "cut-start-is-running",
        "rocket_sink/cluster/detached.py",
        "        return self.ready and all(node.alive for node in self.nodes)\n",
        "        return all(node.alive for node in self.nodes)\n",
        ("tests/cluster/test_detached.py::test_a_start_that_was_cut_short_is_no_running_cluster",),
        "cluster up says that a name server without brokers is the cluster",
    ),
    Defect(
        "missing-broker-not-missed",
        "rocket_sink/commands/check.py",
        '        if row["topic"] == topic and row["broker_name"] not in named:\n',
        '        if row["topic"] == topic and not named:\n',
        ("tests/commands/test_topic_types.py::test_a_broker_that_left_the_route_is_named",),
        "check says ready while a broker of the topic is dead",
    ),
    Defect(
        "tail-queue-by-queue",
        "rocket_sink/commands/tail.py",
        "    yield from heapq.merge(*stored, key=_stored_ms)\n",
        "    for queue in stored:\n        yield from queue\n",
        ("tests/commands/test_tail.py::test_what_is_stored_is_in_the_order_of_time",),
        "the last messages of a topic are shown in no order",
    ),
    Defect(
        "other-encodings-end-a-command",
        "rocket_sink/cli.py",
        "    escape_what_streams_lack()\n",
        "",
        ("tests/commands/test_tail.py::test_characters_that_the_output_lacks_are_escaped",),
        "tail ends at the first character that the terminal's encoding lacks",
    ),
    Defect(
        "json-with-escapes-of-python",
        "rocket_sink/commands/common/output.py",
        "        return _NOT_ASCII.sub(lambda run: json.dumps(run[0])[1:-1], document)\n",
        "        return document\n",
        ("tests/commands/test_tail.py::test_characters_that_the_output_lacks_are_escaped",),
        "programs cannot read what tail --json prints in a locale that is not UTF-8",
    ),
    Defect(
        "columns-not-heeded",
        "rocket_sink/commands/common/output.py",
        "    width = None if sys.stdout.isatty() else _wanted_columns() or _PIPE_WIDTH\n",
        "    width = None if sys.stdout.isatty() else _PIPE_WIDTH\n",
        ("tests/commands/test_output.py::test_a_pipe_is_as_wide_as_columns_says",),
        "tables in a CI log or a window of 80 columns are 140 wide",
    ),
    Defect(
        "healthy-brokers-restarted",
        "rocket_sink/cluster/detached.py",
        "    return state.ready and server_alive and _settings(state) == settings\n",
        "    return False\n",
        ("tests/cluster/test_cluster_live.py::test_up_and_down_twice",),
        "cluster up ends the brokers that work because another one has died",
    ),
    Defect(
        "topic-on-one-broker",
        "rocket_sink/commands/cluster.py",
        "        admin.create_topic(name, queues=queues)\n",
        "        admin.create_topic(name, queues=queues, brokers=[state.brokers[0].name])\n",
        ("tests/commands/test_cluster.py::test_a_topic_is_made_on_all_brokers",),
        "the demo of two brokers runs on one",
    ),
    Defect(
        "later-queues-not-followed",
        "rocket_sink/commands/tail.py",
        "        if time.monotonic() - asked_s >= every_s:\n",
        "        if False:\n",
        ("tests/commands/test_tail.py::test_a_queue_that_comes_later_is_followed_too",),
        "tail shows half of the messages, in silence",
    ),
    Defect(
        "a-backfill-for-refused-rows",
        "rocket_sink/commands/common/stream_run.py",
        ' for reason, n in self.pending.items() if reason != "data"}\n',
        " for reason, n in self.pending.items()}\n",
        ("tests/commands/test_run_view.py",),
        "a run with refused rows ends with a backfill that leaves them out",
    ),
    Defect(
        "executors-without-a-hint",
        "rocket_sink/commands/common/base.py",
        '    if "No module named \'rocket_sink" in text:\n        return _NOT_THERE\n',
        "",
        ("tests/commands/test_cli.py",),
        "a wheel given as --py-files ends in a ModuleNotFoundError that does not say what to do",
    ),
    Defect(
        "spark-before-the-name-server",
        "rocket_sink/commands/transactions.py",
        "    if asks:\n",
        "    if not asks:\n",
        ("tests/commands/test_wrong_use.py",),
        "a mistyped name server is told after half a minute, and a dry run wants one",
    ),
    Defect(
        "some-failed-is-success",
        "rocket_sink/commands/send.py",
        "    return 1 if failed else 0\n",
        "    return 1 if failed and not sent else 0\n",
        ("tests/commands/test_send.py",),
        "a script goes on although some of its messages were refused",
    ),
    Defect(
        "file-wins-over-option",
        "rocket_sink/commands/common/sink_input.py",
        '    for source in ("file", "many", "flags"):\n',
        '    for source in ("many", "file", "flags"):\n',
        (
            "tests/commands/test_sink_input.py::test_a_flag_wins_over_a_pair_and_a_pair_over_the_file",
        ),
        "-O nameServer=... sends to the cluster of the configuration file",
    ),
    Defect(
        "failed-step-says-done",
        "rocket_sink/commands/common/output.py",
        "        elif failure[0] is None:\n",
        "        else:\n",
        ("tests/commands/test_output.py::test_a_bar_that_fails_does_not_say_done",),
        "a backfill that failed reports how many letters it sent in how many seconds, as if done",
    ),
    Defect(
        "bodies-reach-the-terminal",
        "rocket_sink/commands/common/output.py",
        '    """A line on standard output."""\n    click.echo(clean(text))\n',
        '    """A line on standard output."""\n    click.echo(text)\n',
        ("tests/commands/test_hostile_text.py::test_tail",),
        "`tail` shows a message whose body rewrites the user's screen",
    ),
)

VALUES: tuple[Defect, ...] = (
    Defect(
        "a-public-parameter-renamed",
        "rocket_sink/producer/producer.py",
        "def recall(self, topic: str, recall_handle: str)",
        "def recall(self, topic: str, handle: str)",
        ("tests/test_release.py::test_public_names_keep_their_promises",),
        "programs that worked with the last release fail with the next",
    ),
    Defect(
        "delays-overflow-in-messages",
        "rocket_sink/message.py",
        "            if value is not None and value > most:\n",
        "            if value is not None and value >= 2**63:\n",
        ("tests/test_message.py::test_an_illegal_message_cannot_be_made",),
        "a message that is due in millions of years is delivered at once",
    ),
    Defect(
        "app-ids-of-any-form",
        "rocket_sink/options.py",
        "    if given.app_id and not _APP_ID.fullmatch(given.app_id):\n",
        "    if given.app_id and given.app_id.isspace():\n",
        ("tests/test_options.py::test_an_illegal_option_is_explained",),
        "quotes and line breaks of an appId are in commands, queries and paths",
    ),
    Defect(
        "two-delays",
        "rocket_sink/message.py",
        '                ("delay_s", self.delay_s is not None),\n',
        "",
        ("tests/test_message.py::test_an_illegal_message_cannot_be_made",),
        "a message with two delays is sent, and the broker drops one of them silently",
    ),
    Defect(
        "secret-behind-a-cut",
        "rocket_sink/text.py",
        "    for secret in secrets:\n",
        "    text = text[:max_bytes]\n    for secret in secrets:\n",
        ("tests/test_text.py::test_a_secret_at_the_cut_leaves_no_half",),
        "the first half of a secret key is in the ledger",
    ),
    Defect(
        "bidirectional-text",
        "rocket_sink/text.py",
        "    if not line.isprintable():\n",
        '    if any(c < " " or c == "\\x7f" for c in line):\n',
        ("tests/test_text.py::test_any_text_becomes_one_printable_line",),
        "a topic's name reorders what a terminal shows",
    ),
    Defect(
        "lock-behind-a-link",
        "rocket_sink/private_file.py",
        "os.O_NOFOLLOW | ",
        "",
        (
            "tests/test_private_file.py::test_a_lock_that_is_no_file_of_ours_is_refused_and_not_touched",
        ),
        "another user's link in a shared folder makes us write into our own files",
    ),
    Defect(
        "lock-held-in-a-child",
        "rocket_sink/forks.py",
        "        _locks.add(self)\n",
        "        _locks.discard(self)\n",
        ("tests/test_forks.py::test_a_lock_is_free_in_the_child_and_stays_held_in_the_parent",),
        "a child that is forked while another thread has a lock waits for ever",
    ),
    Defect(
        "secret-prints",
        "rocket_sink/option_spec.py",
        """        return "***" if self._text else "''"\n""",
        "        return repr(self._text)\n",
        ("tests/test_options.py::test_a_secret_is_not_printed_and_digests_differ",),
        "the secret key is in the repr of the options, and so in notebooks and logs",
    ),
)

TESTING: tuple[Defect, ...] = (
    Defect(
        "rule-for-none-for-ever",
        "rocket_sink/testing/script.py",
        "        if times == 0:\n",
        "        if times == -1:\n",
        ("tests/testing/test_fake_cluster.py::test_a_rule_for_no_request_is_none",),
        "a test's broker fails each request where none was to",
    ),
    Defect(
        "thaw-forgets",
        "rocket_sink/testing/server.py",
        "            peer.holds_back = True\n            self._frames(peer)\n",
        "            peer.holds_back = True\n",
        ("tests/testing/test_fake_cluster.py::test_freeze_takes_bytes_and_thaw_handles_them",),
        "a scripted broker that froze loses requests which a real one would store",
    ),
    Defect(
        "degraded-and-not-stored",
        "rocket_sink/testing/broker.py",
        "        if request.code in _WRITES and behaviour is not None and not stores(behaviour):\n",
        "        if request.code in _WRITES and behaviour is not None and not behaviour.stores:\n",
        (
            "tests/testing/test_fake_cluster.py::test_refusals_store_nothing_and_degraded_answers_do",
        ),
        "a user's test looks in vain for a message that a real broker would have stored",
    ),
)

GROUPS: tuple[Defect, ...] = (
    Defect(
        "waiters-are-garbage",
        "rocket_sink/producer/driver.py",
        "                completion.token = None\n",
        "",
        ("tests/producer/test_garbage.py::test_messages_and_waiters_are_freed[send-False]",),
        "each synchronous send leaves a cycle that only the garbage collector frees",
    ),
    Defect(
        "group-gone-in-part",
        "rocket_sink/net/channel.py",
        "lost.written or (lost.grouped and owner is begun_owner) or self._is_writing\n",
        "lost.written or self._is_writing\n",
        ("tests/net/test_write_queue.py",),
        "messages that a broker stored count as not sent, and are sent again without a word",
    ),
    Defect(
        "group-expires-often",
        "rocket_sink/wire/connection.py",
        "        due = list(dict.fromkeys(late))  # a group is there as often as it has requests\n",
        "        due = list(late)\n",
        ("tests/wire/test_connection.py::TestGroups",),
        "each message of a group is sent again as often as the group has messages",
    ),
    Defect(
        "answers-unread",
        "rocket_sink/wire/responses.py",
        "    differs = frames != frames[0]\n",
        "    differs = np.zeros_like(frames, np.bool_)\n",
        ("tests/wire/test_answer_shape.py",),
        "a refusal among many acknowledgements counts as stored",
    ),
    Defect(
        "futures-left-open",
        "rocket_sink/producer/send_group.py",
        "            end_all((future, None, error.copy()) for future in self.tokens)\n",
        "            end_all((future, None, error.copy()) for future in self.tokens[:1])\n",
        ("tests/producer/test_send_groups.py::test_a_group_that_was_not_sent_fails_as_a_whole",),
        "a program waits for ever for sends that failed together",
    ),
    Defect(
        "unmade-groups-keep-places",
        "rocket_sink/producer/engine/dispatcher.py",
        "        self._brokers.release(broker, attempt.requests)\n        if isinstance",
        "        self._brokers.release(broker)\n        if isinstance",
        (
            "tests/producer/test_send_groups.py::test_a_group_whose_frames_cannot_be_made_leaves_nothing_behind",
        ),
        "a group that was never sent counts as in flight at its broker for good",
    ),
    Defect(
        "places-kept",
        "rocket_sink/producer/engine/engine.py",
        "                    self.window.give_back(*attempt.release(completion.stored))\n",
        "                    attempt.release(completion.stored)\n",
        ("tests/producer/test_send_groups.py::test_places_are_given_back_with_each_answer",),
        "one message without an answer fills the window for good",
    ),
    Defect(
        "compressed-twice",
        "rocket_sink/task/request_factory.py",
        "        if columns is None or columns.sys_flag is None:\n",
        "        if columns is not None:\n",
        ("tests/task/test_groups.py::test_what_leaves_a_group_is_not_compressed_again",),
        "what is refused once costs the compressor's time twice",
    ),
    Defect(
        "groups-where-order-counts",
        "rocket_sink/task/encode.py",
        '    if singles is None or options.ordering == "none":\n',
        "    if True:\n",
        ("tests/task/test_groups.py::test_no_group_where_order_counts",),
        "the messages of a key are stored in another order",
    ),
    Defect(
        "a-busy-broker-gets-small-groups",
        "rocket_sink/routing/rate_limit.py",
        "        return room if 2 * room >= limit else 0\n",
        "        return min(room, max(1, limit // 4)) if room > 0 else 0\n",
        ("tests/task/test_groups.py::test_parts_of_a_group_are_as_large_as_a_busy_brokers_window",),
        "senders take twice the CPU for each message, just when the brokers are busy",
    ),
    Defect(
        "escapes-escaped",
        "rocket_sink/wire/columns/single_frames.py",
        'key=lambda byte: byte != ord("\\\\")',
        'key=lambda byte: byte == ord("\\\\")',
        ("tests/wire/test_single_frames.py",),
        "properties with quotes arrive with backslashes, or the broker cannot read the header",
    ),
)

DEFECTS: tuple[Defect, ...] = (
    *WIRE,
    *WIRE_COLUMNS,
    *GROUPS,
    *ROUTING,
    *NET,
    *PRODUCER,
    *LEDGER,
    *ROWS,
    *TASK,
    *SPARK,
    *COMMANDS,
    *VALUES,
    *TESTING,
)
