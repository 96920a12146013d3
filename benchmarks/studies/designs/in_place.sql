-- For the two designs that claim in place, in a table {ns}_rows. No update of theirs is a HOT one: the column `state` is in
-- the condition of an index. A settlement compares it with IS NOT DISTINCT FROM: with `=`, and statistics that know of no
-- job in flight, the planner prefers to read the whole index of sessions for every job.

CREATE INDEX {ns}_rows_lanes ON {ns}_rows (queue, priority, share, run_at, id) WHERE state = 'ready';
CREATE INDEX {ns}_rows_held ON {ns}_rows (session_id, claimed_at) WHERE state = 'in_flight';

CREATE FUNCTION {ns}_take(p_session text, p_queue text, p_priority smallint, p_share text, p_most int)
RETURNS SETOF {ns}_held_jobs {settings}
AS $$
DECLARE
    now_us bigint := {ns}_now();
BEGIN
    PERFORM FROM {ns}_sessions s WHERE s.id = p_session AND s.open FOR KEY SHARE;
    IF NOT FOUND THEN RAISE EXCEPTION 'the session is not open'; END IF;
    RETURN QUERY
    WITH picked AS MATERIALIZED (
        SELECT r.ctid AS place FROM {ns}_rows r
        WHERE r.state = 'ready' AND r.queue = p_queue AND r.priority = p_priority AND r.share = p_share AND r.run_at <= now_us
        ORDER BY r.run_at, r.id LIMIT p_most FOR UPDATE SKIP LOCKED
    ), taken AS (
        UPDATE {ns}_rows r
        SET state = 'in_flight', reason = 'claimed', version = version + 1, session_id = p_session, claimed_at = now_us,
            progress = NULL
        WHERE r.ctid = ANY (ARRAY(SELECT p.place FROM picked p)) RETURNING r.*
    )
    SELECT {identity}, state, reason, run_at, version, session_id, attempt, failures, crashes, snoozes, suspect, cancel_asked,
           claimed_at, failure_history, progress, NULL::bigint, NULL::bytea
    FROM taken ORDER BY run_at, id;
END $$;
