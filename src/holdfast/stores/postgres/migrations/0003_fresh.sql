-- One job under an id that no call has named before: where the id may be all the same, because the call was given up and repeated
-- while it was under way, is known from the time. No table is touched: nobody waits for this migration.

-- Whether one slot of either ring, that of ten minutes and that of days, holds an id. One statement per slot, as for {ns}_in_slot.
DO $$
BEGIN
    EXECUTE 'CREATE FUNCTION {ns}_in_slots(p_short int, p_long int, p_id uuid) RETURNS bool LANGUAGE plpgsql STABLE AS $f$ '
        || 'BEGIN CASE p_short ' || (
            SELECT string_agg(format(
                'WHEN %s THEN IF EXISTS (SELECT FROM {ns}_history_%s h WHERE h.id = p_id) THEN RETURN true; END IF;', n, n), ' ')
            FROM generate_series(0, 7) n)
        || ' END CASE; CASE p_long ' || (
            SELECT string_agg(format(
                'WHEN %s THEN RETURN EXISTS (SELECT FROM {ns}_history_%s h WHERE h.id = p_id);', n, n), ' ')
            FROM generate_series(8, 17) n)
        || ' END CASE; END $f$';
END $$;

-- Insert a job without key and limits, whose id no call had named at the time `p_since` by the store's clock (0: it is not known).
-- Answers with the store's time; with null if nothing was written because the id is there: {ns}_insert tells what it means.
-- `p_tell`: the queues to wake.
--
-- A job with that id can only have ended since `p_since`. As a rule that is within the present slots, and the look costs a fifth of
-- one everywhere. As in {ns}_known it comes after the insert, and goes the way that jobs go: from waiting to in flight to the end.
-- Whoever wants to bring one back to waiting waits for us.
CREATE FUNCTION {ns}_insert_fresh(p_id uuid, p_task text, p_payload bytea, p_task_version text, p_queue text, p_share text,
                                  p_priority smallint, p_max_retries int, p_retention bigint, p_correlation_id text,
                                  p_delay bigint, p_run_at bigint, p_since bigint, p_tell text[])
RETURNS bigint LANGUAGE plpgsql
SET search_path FROM CURRENT SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off
AS $$
DECLARE
    now_us bigint := {ns}_now(); until_us bigint; known bool;
BEGIN
    INSERT INTO {ns}_waiting (id, task, payload, task_version, queue, share, priority, max_retries, retention, correlation_id,
                              created_at, run_at)
    VALUES (p_id, p_task, p_payload, p_task_version, p_queue, p_share, p_priority, p_max_retries, p_retention,
            p_correlation_id, now_us,
            CASE WHEN p_run_at IS NULL THEN now_us + p_delay ELSE greatest(p_run_at, now_us) END)
    ON CONFLICT (id) DO NOTHING;
    IF NOT FOUND THEN RETURN NULL; END IF;
    -- The insert may have had to wait, and others went on meanwhile.
    until_us := now_us + (extract(epoch FROM clock_timestamp() - statement_timestamp()) * 1000000)::bigint;
    IF p_since <= until_us AND {ns}_slot(3600000000, p_since) = {ns}_slot(3600000000, until_us)
       AND until_us - p_since < 600000000 THEN
        known := EXISTS (SELECT FROM {ns}_in_flight x WHERE x.id = p_id) OR EXISTS (SELECT FROM {ns}_kept x WHERE x.id = p_id)
            OR {ns}_in_slots({ns}_slot(3600000000, until_us), {ns}_slot(86400000000, until_us), p_id);
    ELSE
        known := {ns}_known(ARRAY[p_id], p_id, p_id, now_us) IS NOT NULL;
    END IF;
    IF known THEN
        DELETE FROM {ns}_waiting w WHERE w.id = p_id;  -- nobody has seen it
        RETURN NULL;
    END IF;
    IF p_tell <> '{}' THEN PERFORM pg_notify('{ns}', queue) FROM unnest(p_tell) queue; END IF;
    RETURN now_us;
END $$;
