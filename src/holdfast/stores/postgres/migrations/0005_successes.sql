-- Successes that are alike in all but their ids, as nearly all are: of one session, claimed under the same version, with the same
-- result. No table is touched: nobody waits for this migration.

-- As {ns}_succeed, which is for the others, and for processes of the version before. Here the rows are deleted where the index finds
-- them. An index scan takes the elements of an array in the order of the index, whatever their own: so rows are locked in the order
-- of ids, as by everybody, without being locked and looked for before; and one that changed in place while we waited for it is not
-- missed. Nothing is joined to them, so they reach the indexes of the history in the order of ids, too.
CREATE FUNCTION {ns}_succeed_alike(p_session text, p_ids uuid[], p_version int, p_result bytea)
RETURNS TABLE (job_id text, state text, reason text, version int, session_id text, session_open bool, cancel_asked bool)
LANGUAGE plpgsql ROWS 1
SET search_path FROM CURRENT SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off
SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    now_us bigint := {ns}_now(); settled uuid[] := '{}';
BEGIN
    PERFORM FROM {ns}_sessions s WHERE s.id = p_session AND s.open FOR KEY SHARE;
    IF FOUND THEN
        WITH gone AS (
            DELETE FROM {ns}_in_flight f
            WHERE f.id = ANY (p_ids) AND f.version = p_version AND f.session_id IS NOT DISTINCT FROM p_session
            RETURNING f.*, {ns}_slot(f.retention, now_us) AS slot
        ), past AS (
            INSERT INTO {ns}_history (id, task, payload, task_version, queue, share, priority, max_retries, retention, key,
                key_hash, key_window, correlation_id, created_at, reason, run_at, version, session_id, attempt, failures,
                crashes, snoozes, suspect, claimed_at, failure_history, progress, cancel_asked, state, ended_at,
                expires_at, result, slot)
            SELECT x.id, x.task, x.payload, x.task_version, x.queue, x.share, x.priority, x.max_retries, x.retention,
                   x.key, x.key_hash, x.key_window, x.correlation_id, x.created_at, 'succeeded', x.run_at, x.version,
                   x.session_id, 1, 0, 0, 0, false, x.claimed_at, '', x.progress, x.cancel_asked, 'succeeded', now_us,
                   now_us + x.retention, p_result, x.slot
            FROM gone x WHERE x.slot IS NOT NULL
        ), kept AS (
            INSERT INTO {ns}_kept (id, task, payload, task_version, queue, share, priority, max_retries, retention, key,
                key_hash, key_window, correlation_id, created_at, reason, run_at, version, session_id, attempt, failures,
                crashes, snoozes, suspect, claimed_at, failure_history, progress, cancel_asked, state, ended_at,
                expires_at, result)
            SELECT x.id, x.task, x.payload, x.task_version, x.queue, x.share, x.priority, x.max_retries, x.retention,
                   x.key, x.key_hash, x.key_window, x.correlation_id, x.created_at, 'succeeded', x.run_at, x.version,
                   x.session_id, 1, 0, 0, 0, false, x.claimed_at, '', x.progress, x.cancel_asked, 'succeeded', now_us,
                   now_us + x.retention, p_result
            FROM gone x WHERE x.slot IS NULL
        ), counted AS (
            INSERT INTO {ns}_tallies (slot, queue, state, jobs)
            SELECT x.slot, x.queue, 'succeeded', count(*) FROM gone x GROUP BY x.slot, x.queue
        )
        SELECT coalesce(array_agg(x.id), '{}') INTO settled FROM gone x;
    END IF;
    IF cardinality(settled) < cardinality(p_ids) THEN
        RETURN QUERY
        SELECT m.id::text, j.state, j.reason, j.version, j.session_id, coalesce(s.open, false), j.cancel_asked
        FROM unnest(p_ids) AS m (id)
        LEFT JOIN LATERAL {ns}_get(m.id) j ON true
        LEFT JOIN LATERAL (SELECT s.open FROM {ns}_sessions s WHERE s.id = j.session_id OFFSET 0) s ON true
        WHERE NOT m.id = ANY (settled);
    END IF;
END $$;
