"""Pages of a service at work: a real worker around the stub engine, real parts in the store."""

import re

from app.jobs.workers import worker_gone
from app.kit.ids import public_id
from app.reconcile.samples import take_sample
from tests.admin.pages.running import BAD, Running, sha256, wait_until
from tests.fixtures.builders import Builders


def test_the_overview_shows_the_worker_the_running_job_and_the_errors(running: Running):
    text = running.page("/admin")
    assert running.jobs["running"] in text
    assert "in progress" in text
    assert "steering_failed" in text
    assert re.search(r"<dt>Workers ready</dt>\s*<dd class=\"value\">1</dd>", text)


def test_samples_count_what_ended_since_the_one_before(running: Running):
    database = running.dashboard.database
    with database.transaction() as conn:
        conn.execute("UPDATE samples SET at = at - interval '20 seconds'")
    take_sample(database)
    number = running.dashboard.number
    assert number("SELECT sum(requests)::integer FROM samples") == 123
    assert number("SELECT sum(errored)::integer FROM samples") == 12
    charged = number("SELECT sum(tokens_charged)::integer FROM jobs")
    assert number("SELECT sum(tokens)::integer FROM samples") == charged
    take_sample(database)  # too soon after the last: nothing is counted twice
    assert number("SELECT count(*) FROM samples") == 2


def test_a_job_shows_its_steered_texts_beside_the_baseline(running: Running):
    text = running.job("pairs", "/samples")
    assert "Baseline" in text
    assert "Steered" in text
    assert "adds 4 \u00d7 sv_" in text
    assert "(changes nothing)" in text
    # Two steered versions of one prompt, each beside the same baseline.
    assert text.count('<article class="sample">') == 2


def test_the_samples_of_a_job_without_texts_say_when_they_come(running: Running):
    assert "No texts yet" in running.job("running", "/samples")


def test_a_job_shows_state_timeline_shards_and_where_the_time_went(running: Running):
    text = running.job("errors")
    for piece in ("completed", "Submitted", "First part published", "Where the time went"):
        assert piece in text
    assert 'class="bad" title="Requests 0 to' in text
    assert "steering_failed" in text
    live = running.job("running")
    assert 'class="busy" title="Requests 0 to 2: running"' in live
    assert "Cancel this Job" in live


def test_errors_lead_to_their_requests(running: Running):
    text = running.job("errors", "/requests?status=errored")
    assert len(re.findall(r"/requests/\d+\">", text)) == 12
    assert "The stub was told to fail this request." in text


def test_one_request_shows_what_was_asked_and_what_came_of_it(running: Running):
    text = running.job("pairs", "/requests/1")
    assert "adds 4 \u00d7 sv_" in text
    assert "ended by length" in text
    assert "settled</span>" in text


def test_every_file_is_listed_and_downloads_as_the_manifest_says(running: Running):
    text = running.job("pairs", "/files")
    found = re.findall(r'href="(/admin/jobs/[^"]+/files/[^"]+)"', text)
    assert {path.rpartition("/")[2] for path in found} >= {"manifest.json", "SHA256SUMS"}
    browser = running.dashboard.browser("read-only")
    for path in found:
        answer = browser.get(path)
        assert answer.status_code == 200
        assert sha256(answer.content) in text
        assert answer.headers["content-disposition"].startswith("attachment")
        part = browser.get(path, range="bytes=0-3")
        assert (part.status_code, part.content) == (206, answer.content[:4])


def test_a_range_beyond_a_file_is_refused(running: Running):
    browser = running.dashboard.browser("read-only")
    path = f"/admin/jobs/{running.jobs['pairs']}/files/manifest.json"
    assert browser.get(path, range="bytes=99999999-").status_code == 416


def test_free_text_is_escaped_everywhere(running: Running):
    pages = ["/admin", "/admin/jobs", "/admin/workers", "/admin/models"]
    pages += [f"/admin/jobs?q={BAD}", f"/admin/jobs/cancel?q={BAD}"]
    for tail in ("", "/samples", "/files", "/requests", "/requests/0", "/requests/1"):
        pages.append(f"/admin/jobs/{running.jobs['pairs']}{tail}")
    seen = 0
    for path in pages:
        text = running.page(path)
        assert "<script>alert" not in text
        seen += "&lt;script&gt;alert" in text
    assert seen >= 8


def test_a_worker_is_shown_with_what_it_does(running: Running):
    text = running.page("/admin/workers")
    for piece in ("stub 1", "passed", "eager", "MiB", "Drain"):
        assert piece in text


def test_a_drain_can_be_taken_back_while_the_worker_has_not_heard_of_it(running: Running):
    database = running.dashboard.database
    # Registered, and no process behind it: no heartbeat can fall between the two acts.
    worker = Builders(database).a_worker(host="elsewhere")
    path = f"/admin/workers/{public_id('worker', worker.worker_id)}"
    browser = running.dashboard.browser("operator")
    answer = browser.post(f"{path}/drain")
    assert answer.headers["location"] == "/admin/workers?said=drain"
    assert "Keep it" in running.page("/admin/workers")
    answer = browser.post(f"{path}/undrain")
    assert answer.headers["location"] == "/admin/workers?said=undrain"
    assert "Keep it" not in running.page("/admin/workers")
    assert browser.post("/admin/workers/worker_1/drain").status_code == 404
    with database.transaction() as conn:
        worker_gone(conn, worker.worker_id)


def test_models_show_what_they_can_and_who_serves_them(running: Running):
    text = running.page("/admin/models")
    for piece in ("LlamaForCausalLM", "1 worker ready", "resid_post", "64 tokens"):
        assert piece in text


def test_a_worker_that_drains_by_a_button_ends_and_cannot_be_kept(running: Running):
    browser = running.dashboard.browser("operator")
    path = re.search(r'action="(/admin/workers/[^"]+)/drain"', running.page("/admin/workers"))
    assert path is not None
    browser.post(f"{path[1]}/drain")
    wait_until(lambda: "draining</span>" in running.page("/admin/workers"), "a heartbeat")
    assert "Keep it" not in running.page("/admin/workers")
    assert browser.post(f"{path[1]}/undrain").status_code == 409
