"""The turnstile: groups pass whole, in order and alone; nobody waits in vain."""

from hypothesis import given
from hypothesis import strategies as st

from worker.engine.groups import SEAT_KEY, Seat, Turnstile, note_of, read_note, seat_of


def seats(group: str, size: int) -> list[Seat]:
    return [Seat(group, size, place) for place in range(size)]


def hold(turnstile: Turnstile[str], seat: Seat) -> str:
    """Hand in the request of a seat; return it."""
    request = f"{seat.group}{seat.place}"
    assert turnstile.hold(request, seat)
    return request


def ended(turnstile: Turnstile[str], *requests: str) -> None:
    turnstile.settle(lambda request: request in requests)


def test_a_group_passes_when_all_of_it_is_there_in_the_order_of_its_places() -> None:
    turnstile: Turnstile[str] = Turnstile()
    first, second, third = seats("a", 3)
    for seat in (third, first):
        hold(turnstile, seat)
        assert turnstile.admit(busy=False) == []
    hold(turnstile, second)
    assert turnstile.admit(busy=False) == ["a0", "a1", "a2"]
    assert turnstile.admit(busy=False) == [], "once"


def test_a_group_waits_until_the_engine_is_empty_and_those_after_it_wait_for_it() -> None:
    turnstile: Turnstile[str] = Turnstile()
    assert not turnstile.hold("before", None)
    hold(turnstile, Seat("a", 1, 0))
    assert turnstile.hold("after", None), "or a group would never find the engine empty"
    assert turnstile.admit(busy=True) == []
    assert turnstile.admit(busy=False) == ["a0"]
    assert turnstile.hold("beside", None)
    assert turnstile.admit(busy=False) == []
    ended(turnstile, "a0")
    assert turnstile.admit(busy=False) == ["after", "beside"]
    assert not turnstile.in_use
    assert not turnstile.hold("later", None)


def test_requests_pass_straight_on_while_a_group_is_only_forming() -> None:
    turnstile: Turnstile[str] = Turnstile()
    hold(turnstile, Seat("a", 2, 0))
    assert not turnstile.hold("other", None)


def test_two_groups_pass_one_after_the_other_with_those_between_them_between() -> None:
    turnstile: Turnstile[str] = Turnstile()
    hold(turnstile, Seat("a", 1, 0))
    assert turnstile.hold("between", None)
    hold(turnstile, Seat("b", 1, 0))
    assert turnstile.hold("behind", None)
    assert turnstile.admit(busy=False) == ["a0"]
    ended(turnstile, "a0")
    assert turnstile.admit(busy=False) == ["between"], "b waits for them"
    assert turnstile.admit(busy=True) == []
    assert turnstile.admit(busy=False) == ["b0"]
    ended(turnstile, "b0")
    assert turnstile.admit(busy=False) == ["behind"]


def test_a_seat_that_was_given_up_is_not_waited_for_whenever_its_note_comes() -> None:
    for order in ("note first", "note last"):
        turnstile: Turnstile[str] = Turnstile()
        first, second, third = seats("a", 3)
        if order == "note first":
            turnstile.give_up(second)
        hold(turnstile, first)
        hold(turnstile, third)
        if order == "note last":
            turnstile.give_up(second)
        turnstile.give_up(second)
        assert turnstile.admit(busy=False) == ["a0", "a2"], order
        turnstile.give_up(first)  # a late note changes nothing
        ended(turnstile, "a0", "a2")
        assert not turnstile.in_use


def test_a_group_of_which_nothing_is_left_is_no_obstacle() -> None:
    turnstile: Turnstile[str] = Turnstile()
    first, second = seats("a", 2)
    request = hold(turnstile, first)
    turnstile.give_up(second)
    turnstile.forget(request)
    assert turnstile.hold("other", None), "it waits for the empty group, for a moment"
    assert turnstile.admit(busy=False) == ["other"]
    assert not turnstile.in_use


def test_a_request_that_comes_after_its_seat_was_given_up_runs_by_itself() -> None:
    turnstile: Turnstile[str] = Turnstile()
    first, second = seats("a", 2)
    hold(turnstile, first)
    turnstile.give_up(second)
    assert turnstile.admit(busy=False) == ["a0"]
    late = hold(turnstile, second)
    ended(turnstile, "a0")
    turnstile.forget(late)  # its abort follows
    assert turnstile.admit(busy=False) == []
    assert not turnstile.in_use


def test_an_aborted_member_of_a_running_group_goes_on_until_nobody_wants_any() -> None:
    turnstile: Turnstile[str] = Turnstile()
    for seat in seats("a", 3):
        hold(turnstile, seat)
    assert not turnstile.keep_inside("a0"), "it does not run yet: it can be let go"
    turnstile.admit(busy=False)
    assert turnstile.keep_inside("a0")
    assert turnstile.abandoned() == []
    ended(turnstile, "a1")
    assert turnstile.keep_inside("a2")
    assert sorted(turnstile.abandoned()) == ["a0", "a2"]
    assert not turnstile.keep_inside("a stranger")


def test_groups_of_which_no_request_ever_arrived_are_forgotten() -> None:
    turnstile: Turnstile[str] = Turnstile()
    for number in range(2000):
        turnstile.give_up(Seat(f"group {number}", 2, 0))
    assert len(turnstile._forming) <= 257


def test_a_note_is_a_request_id_that_reads_back() -> None:
    seat = Seat("17:a", 32, 5)
    assert read_note(note_of(seat)) == seat
    assert read_note("17.5.0.3") is None
    assert seat_of({SEAT_KEY: list(seat), "ticket": 1}) == seat
    assert seat_of({"ticket": 1}) is None
    assert seat_of(None) is None


class Driven:
    """An engine that schedules what its turnstile lets through, as the scheduler does."""

    def __init__(self) -> None:
        self.turnstile: Turnstile[str] = Turnstile()
        self.running: list[str] = []
        self.waiting: list[str] = []
        self.passed: list[str] = []
        self.gone: set[str] = set()

    def arrive(self, arrival: Seat | str) -> None:
        if isinstance(arrival, Seat):
            self.waiting.append(hold(self.turnstile, arrival))
        elif self.turnstile.hold(arrival, None):
            self.waiting.append(arrival)
        else:
            self.passed.append(arrival)
            self.running.append(arrival)
        self.pump()

    def abort(self, request: str) -> None:
        if not self.turnstile.keep_inside(request):
            self.turnstile.forget(request)
            self.drop(request)
        self.pump()

    def finish(self, request: str) -> None:
        self.drop(request)
        self.pump()

    def drop(self, request: str) -> None:
        (self.waiting if request in self.waiting else self.running).remove(request)
        self.gone.add(request)

    def pump(self) -> None:
        self.turnstile.settle(self.gone.__contains__)
        for request in self.turnstile.abandoned():
            self.drop(request)
        self.turnstile.settle(self.gone.__contains__)
        for request in self.turnstile.admit(busy=bool(self.running)):
            self.waiting.remove(request)
            self.passed.append(request)
            self.running.append(request)
        kinds = {request.split(".")[0] if "." in request else "others" for request in self.running}
        assert len(kinds) <= 1, "a group runs with nothing beside it"


@given(st.data())
def test_whatever_the_order_of_events_everyone_passes_once_and_groups_alone(
    data: st.DataObject,
) -> None:
    """Arrivals, notes, aborts and ends in any order."""
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    arrivals: list[Seat | str] = [
        seat for number, size in enumerate(sizes) for seat in seats(f"g{number}.", size)
    ]
    arrivals += [f"other{number}" for number in range(data.draw(st.integers(0, 6)))]
    engine = Driven()
    for arrival in data.draw(st.permutations(arrivals)):
        fate = data.draw(st.sampled_from(["arrives", "arrives", "given up", "aborted"]))
        if fate == "given up" and isinstance(arrival, Seat):
            engine.turnstile.give_up(arrival)
            engine.pump()
        else:
            engine.arrive(arrival)
        there = [*engine.waiting, *engine.running]
        if fate == "aborted" and there:
            engine.abort(data.draw(st.sampled_from(there)))
        if engine.running and data.draw(st.booleans()):
            engine.finish(data.draw(st.sampled_from(engine.running)))
    while engine.running:
        engine.finish(engine.running[0])
    assert engine.waiting == [], "nobody waits for ever"
    assert len(engine.passed) == len(set(engine.passed))
    for number in range(len(sizes)):
        members = [request for request in engine.passed if request.startswith(f"g{number}.")]
        assert members == sorted(members)
    assert not engine.turnstile.in_use
