-- The paths of nearly all jobs, beside the general ones: new jobs that differ in their ids and payloads only, one lane, plain
-- successes. What is the same for all is said once, what differs comes as arrays: to read a JSON object for each job took more
-- time than to write the job. No table is touched: nobody waits for this migration.

-- Insert jobs that are alike but for their ids, sorted, and their payloads, of which each is the bytes of `p_payloads` from its
-- start, counted from 1, and its size. `p_same`: the rest. True if all were created. False if not one was, because an id was there
-- before: {ns}_insert tells which. `p_tell`: the queues to wake.
CREATE FUNCTION {ns}_insert_alike(p_ids uuid[], p_starts int[], p_sizes int[], p_payloads bytea, p_same json, p_tell text[])
RETURNS bool LANGUAGE plpgsql
SET search_path FROM CURRENT SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off
AS $$
DECLARE
    now_us bigint := {ns}_now(); same record; due bigint;
BEGIN
    SELECT * INTO same FROM json_to_record(p_same) AS s (task text, task_version text, queue text, share text,
        priority smallint, max_retries int, retention bigint, correlation_id text, delay bigint, run_at bigint);
    due := CASE WHEN same.run_at IS NULL THEN now_us + same.delay ELSE greatest(same.run_at, now_us) END;
    BEGIN  -- without ON CONFLICT, which costs a look and a record in the log for each row
        INSERT INTO {ns}_waiting (id, task, payload, task_version, queue, share, priority, max_retries, retention,
                                  correlation_id, created_at, run_at)
        SELECT n.id, same.task, substring(p_payloads FROM n.start FOR n.size), same.task_version, same.queue, same.share,
               same.priority, same.max_retries, same.retention, same.correlation_id, now_us, due
        FROM unnest(p_ids, p_starts, p_sizes) AS n (id, start, size);
    EXCEPTION WHEN unique_violation THEN
        RETURN false;
    END;
    IF {ns}_known(p_ids, p_ids[1], p_ids[cardinality(p_ids)], now_us) IS NOT NULL THEN
        DELETE FROM {ns}_waiting w WHERE w.id = ANY (p_ids);  -- nobody has seen them
        RETURN false;
    END IF;
    IF p_tell <> '{}' THEN PERFORM pg_notify('{ns}', queue) FROM unnest(p_tell) queue; END IF;
    RETURN true;
END $$;

-- Claim up to `p_most` due jobs of the only lane that the caller knows of, from the due time `p_since` on. The spaces around the
-- lane, and what the last row says: as for {ns}_claim. `more`: what only few jobs have.
CREATE FUNCTION {ns}_claim_lane(p_session text, p_queue text, p_priority smallint, p_share text, p_since bigint, p_gaps json,
                                p_most int)
RETURNS TABLE (id text, payload bytea, created_at bigint, run_at bigint, more text, task text, task_version text,
               max_retries int, retention bigint, correlation_id text, now_us bigint, standing int)
LANGUAGE plpgsql ROWS 100
SET search_path FROM CURRENT SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off
SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    claimed int;
BEGIN
    now_us := {ns}_now();
    standing := 0;
    PERFORM FROM {ns}_sessions s WHERE s.id = p_session AND s.open FOR KEY SHARE;
    IF NOT FOUND THEN RETURN NEXT; RETURN; END IF;
    standing := 1;
    IF EXISTS (
        SELECT FROM json_to_recordset(p_gaps) AS g (queue text, priority smallint, from_share text, to_share text)
        CROSS JOIN LATERAL (
            SELECT FROM {ns}_waiting w
            WHERE w.queue = g.queue AND w.priority = g.priority AND w.share >= g.from_share AND w.share < g.to_share LIMIT 1) x
    ) OR EXISTS (
        SELECT FROM json_to_recordset(p_gaps) AS g (queue text, after_priority smallint, before_priority smallint)
        CROSS JOIN LATERAL (
            SELECT FROM {ns}_waiting w
            WHERE w.queue = g.queue AND w.priority > g.after_priority AND w.priority < g.before_priority LIMIT 1) x
    ) THEN RETURN NEXT; RETURN; END IF;
    standing := 3;
    RETURN QUERY
    WITH gone AS (
        DELETE FROM {ns}_waiting w WHERE w.ctid = ANY (ARRAY(
            SELECT x.ctid FROM {ns}_waiting x
            WHERE x.queue = p_queue AND x.priority = p_priority AND x.share = p_share
              AND x.run_at >= p_since AND x.run_at <= now_us
              AND NOT EXISTS (SELECT FROM {ns}_paused p WHERE p.queue = p_queue)
            ORDER BY x.run_at, x.id LIMIT p_most FOR UPDATE SKIP LOCKED))
        RETURNING w.*
    ), taken AS (
        INSERT INTO {ns}_in_flight (id, task, payload, task_version, queue, share, priority, max_retries, retention, key,
            key_hash, key_window, correlation_id, created_at, reason, run_at, version, session_id, attempt, failures,
            crashes, snoozes, suspect, claimed_at, failure_history)
        SELECT g.id, g.task, g.payload, g.task_version, g.queue, g.share, g.priority, g.max_retries, g.retention, g.key,
               g.key_hash, g.key_window, g.correlation_id, g.created_at, 'claimed', g.run_at, g.version + 1, p_session,
               g.attempt, g.failures, g.crashes, g.snoozes, g.suspect, now_us, g.failure_history
        FROM gone g
    )
    SELECT g.id::text, g.payload, g.created_at, g.run_at,
           CASE WHEN g.version > 0 OR g.key IS NOT NULL THEN json_build_object(
               'version', g.version, 'attempt', g.attempt, 'failures', g.failures, 'crashes', g.crashes,
               'snoozes', g.snoozes, 'suspect', g.suspect, 'failure_history', replace(encode(g.failure_history, 'base64'), E'\n', ''),
               'key', CASE WHEN g.key IS NOT NULL THEN json_build_object(
                   'text', g.key, 'payload_hash', g.key_hash, 'window', g.key_window) END)::text END,
           g.task, g.task_version, g.max_retries, g.retention, g.correlation_id, NULL::bigint, NULL::int
    FROM gone g ORDER BY g.run_at, g.id;
    GET DIAGNOSTICS claimed = ROW_COUNT;
    IF claimed < p_most THEN
        SELECT w.run_at INTO run_at FROM {ns}_waiting w
        WHERE w.queue = p_queue AND w.priority = p_priority AND w.share = p_share AND w.run_at > now_us
          AND NOT EXISTS (SELECT FROM {ns}_paused p WHERE p.queue = p_queue)
        ORDER BY w.run_at LIMIT 1;
    END IF;
    RETURN NEXT;
END $$;

-- Settle jobs of one open session, sorted by id, that succeeded at their first attempt. The result of each is `p_result` or, if
-- its id is in `p_varied`, the bytes of `p_results` from its start, counted from 1, and its size (null: none). Answers as
-- {ns}_settle does.
--
-- Unlike there, the rows are deleted by ctid: one that changed in place while we waited for it is missed then, and so refused,
-- though its guard holds; the caller repeats those. The results are joined to what is in memory anyway, by a hash table: with
-- nested loops, it would be each with each.
CREATE FUNCTION {ns}_succeed(p_session text, p_ids uuid[], p_versions int[], p_result bytea, p_varied uuid[], p_starts int[],
                             p_sizes int[], p_results bytea)
RETURNS TABLE (job_id text, state text, reason text, version int, session_id text, session_open bool, cancel_asked bool)
LANGUAGE plpgsql ROWS 1
SET search_path FROM CURRENT SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off
SET enable_nestloop = off SET enable_mergejoin = off SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    now_us bigint := {ns}_now(); settled uuid[] := '{}';
BEGIN
    PERFORM FROM {ns}_sessions s WHERE s.id = p_session AND s.open FOR KEY SHARE;
    IF FOUND THEN
        WITH gone AS (
            DELETE FROM {ns}_in_flight f WHERE f.ctid = ANY (ARRAY(
                SELECT x.ctid FROM unnest(p_ids, p_versions) AS m (id, version)
                CROSS JOIN LATERAL (
                    SELECT f.ctid FROM {ns}_in_flight f
                    WHERE f.id = m.id AND f.version = m.version AND f.session_id IS NOT DISTINCT FROM p_session
                    OFFSET 0 FOR UPDATE) x))
            RETURNING f.*, {ns}_slot(f.retention, now_us) AS slot
        ), past AS (
            INSERT INTO {ns}_history (id, task, payload, task_version, queue, share, priority, max_retries, retention, key,
                key_hash, key_window, correlation_id, created_at, reason, run_at, version, session_id, attempt, failures,
                crashes, snoozes, suspect, claimed_at, failure_history, progress, cancel_asked, state, ended_at, expires_at,
                result, slot)
            SELECT x.id, x.task, x.payload, x.task_version, x.queue, x.share, x.priority, x.max_retries, x.retention, x.key,
                   x.key_hash, x.key_window, x.correlation_id, x.created_at, 'succeeded', x.run_at, x.version, x.session_id,
                   1, 0, 0, 0, false, x.claimed_at, '', x.progress, x.cancel_asked, 'succeeded', now_us,
                   now_us + x.retention,
                   CASE WHEN r.id IS NULL THEN p_result ELSE substring(p_results FROM r.start FOR r.size) END, x.slot
            FROM gone x LEFT JOIN unnest(p_varied, p_starts, p_sizes) AS r (id, start, size) ON r.id = x.id
            WHERE x.slot IS NOT NULL
        ), kept AS (
            INSERT INTO {ns}_kept (id, task, payload, task_version, queue, share, priority, max_retries, retention, key,
                key_hash, key_window, correlation_id, created_at, reason, run_at, version, session_id, attempt, failures,
                crashes, snoozes, suspect, claimed_at, failure_history, progress, cancel_asked, state, ended_at, expires_at,
                result)
            SELECT x.id, x.task, x.payload, x.task_version, x.queue, x.share, x.priority, x.max_retries, x.retention, x.key,
                   x.key_hash, x.key_window, x.correlation_id, x.created_at, 'succeeded', x.run_at, x.version, x.session_id,
                   1, 0, 0, 0, false, x.claimed_at, '', x.progress, x.cancel_asked, 'succeeded', now_us,
                   now_us + x.retention,
                   CASE WHEN r.id IS NULL THEN p_result ELSE substring(p_results FROM r.start FOR r.size) END
            FROM gone x LEFT JOIN unnest(p_varied, p_starts, p_sizes) AS r (id, start, size) ON r.id = x.id
            WHERE x.slot IS NULL
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
