"""Patches: in force, taken back exactly, and harmless when somebody else has patched on top."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from ep_hooks.errors import AdapterError
from ep_hooks.patching import Patch, PatchSet


class Base:
    data = 3

    def method(self, x: int = 1) -> tuple[str, int]:
        """Documented."""
        return (type(self).__name__, x)

    @classmethod
    def make(cls, x: int = 1) -> tuple[str, int]:
        return (cls.__name__, x)

    @staticmethod
    def static(x: int = 1) -> int:
        return x

    @property
    def prop(self) -> int:
        return 1


class Child(Base):
    pass


def ten_more(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = original(*args, **kwargs)
    return result + 10 if isinstance(result, int) else (result[0], result[1] + 10)


@pytest.fixture(autouse=True)
def _classes_are_left_as_found() -> Any:
    before = dict(vars(Base)), dict(vars(Child))
    yield
    assert (dict(vars(Base)), dict(vars(Child))) == before


class TestKinds:
    def test_method(self) -> None:
        raw = vars(Base)["method"]
        patch = Patch(Base, "method", ten_more)
        assert Base().method() == ("Base", 1)
        patch.apply()
        assert Base().method(2) == ("Base", 12)
        assert Child().method(x=2) == ("Child", 12)
        assert patch.restore()
        assert vars(Base)["method"] is raw

    def test_inherited_method_is_deleted_again(self) -> None:
        patch = Patch(Child, "method", ten_more)
        patch.apply()
        assert "method" in vars(Child)
        assert Child().method() == ("Child", 11)
        assert Base().method() == ("Base", 1)
        patch.restore()
        assert "method" not in vars(Child)

    def test_static_method(self) -> None:
        raw = vars(Base)["static"]
        with PatchSet() as patches:
            patches.replace(Base, "static", ten_more)
            assert isinstance(vars(Base)["static"], staticmethod)
            assert Base.static(2) == Base().static(2) == 12
        assert vars(Base)["static"] is raw

    def test_class_method_is_bound_to_the_class_it_is_called_on(self) -> None:
        raw = vars(Base)["make"]
        with PatchSet() as patches:
            patch = patches.replace(Base, "make", ten_more)
            assert isinstance(vars(Base)["make"], classmethod)
            assert Base.make() == ("Base", 11)
            assert Child.make(x=5) == ("Child", 15)
            patch.active = False
            assert Child.make(5) == ("Child", 5)
            patch.active = True
        assert vars(Base)["make"] is raw

    def test_callable_object_in_a_class_does_not_become_a_method(self) -> None:
        class Holder:
            call = functools.partial(Base.static, 7)

        with PatchSet() as patches:
            patches.replace(Holder, "call", ten_more)
            assert Holder().call() == 17
        assert Holder().call() == 7

    def test_instance_method(self) -> None:
        one, other = Base(), Base()
        patch = Patch(one, "method", ten_more)
        patch.apply()
        assert one.method() == ("Base", 11)
        assert other.method() == ("Base", 1)
        patch.restore()
        assert "method" not in vars(one)

    def test_instance_with_its_own_function(self) -> None:
        one = types.SimpleNamespace(f=lambda: 1)
        own = one.f
        with PatchSet() as patches:
            patches.replace(one, "f", ten_more)
            assert one.f() == 11
        assert one.f is own

    def test_torch_module_instance(self) -> None:
        layer = nn.Identity()
        with PatchSet() as patches:
            patches.replace(layer, "forward", ten_more)
            assert layer(1) == 11
        assert "forward" not in vars(layer)
        assert layer(1) == 1

    def test_module(self) -> None:
        module = types.ModuleType("some_module")
        module.f = own = lambda x=1: x  # type: ignore[attr-defined]
        with PatchSet() as patches:
            patches.replace(module, "f", ten_more)
            assert module.f(2) == 12
        assert module.f is own

    def test_metadata_is_kept(self) -> None:
        with PatchSet() as patches:
            signature = inspect.signature(Base.method)
            patches.replace(Base, "method", ten_more)
            assert Base.method.__doc__ == "Documented."
            assert inspect.signature(Base.method) == signature


class TestRefusals:
    @pytest.mark.parametrize(
        ("owner", "name", "reason"),
        [
            (Base, "absent", "does not exist"),
            (Base, "data", "only functions"),
            (Base, "prop", "only functions"),
            (Base(), "prop", "only functions"),
            (int, "bit_length", "cannot replace"),
        ],
    )
    def test_refused_by_name(self, owner: Any, name: str, reason: str) -> None:
        with pytest.raises(AdapterError, match=reason) as caught:
            Patch(owner, name, ten_more).apply()
        assert name in str(caught.value)

    def test_set_stays_usable_after_a_refusal(self) -> None:
        patches = PatchSet()
        patches.replace(Base, "static", ten_more)
        with pytest.raises(AdapterError):
            patches.replace(Base, "absent", ten_more)
        assert len(patches) == 1
        patches.restore()


class TestIdempotence:
    def test_apply_twice_and_restore_twice(self) -> None:
        patch = Patch(Base, "static", ten_more)
        patch.apply()
        patch.apply()
        assert Base.static(1) == 11
        assert patch.restore()
        assert patch.restore()
        assert Base.static(1) == 1

    def test_apply_restore_apply(self) -> None:
        patch = Patch(Base, "static", ten_more)
        for _ in range(3):
            patch.apply()
            assert Base.static(1) == 11
            patch.restore()
            assert Base.static(1) == 1

    def test_error_in_the_replacement_leaves_the_patch_in_force(self) -> None:
        def fails(original: Any, x: int = 1) -> int:
            raise ZeroDivisionError

        with PatchSet() as patches:
            patches.replace(Base, "static", fails)
            for _ in range(2):
                with pytest.raises(ZeroDivisionError):
                    Base.static()

    def test_set_counts_the_same_replacement_once(self) -> None:
        with PatchSet() as patches:
            patches.replace(Base, "static", ten_more)
            patches.replace(Base, "static", ten_more)
            assert len(patches) == 1
            assert Base.static(1) == 11

    def test_set_is_true_while_it_holds_patches(self) -> None:
        patches = PatchSet()
        assert not patches
        patches.replace(Base, "static", ten_more)
        assert patches
        patches.restore()
        assert not patches

    def test_two_sets_restored_in_order_of_nesting(self) -> None:
        raw = vars(Base)["static"]
        outer, inner = PatchSet(), PatchSet()
        outer.replace(Base, "static", ten_more)
        inner.replace(Base, "static", ten_more)
        assert Base.static(1) == 21
        inner.restore()
        assert Base.static(1) == 11
        outer.restore()
        assert vars(Base)["static"] is raw

    def test_two_patches_of_one_set_on_one_function(self) -> None:
        def twice(original: Callable[..., int], x: int = 1) -> int:
            return 2 * original(x)

        raw = vars(Base)["static"]
        with PatchSet() as patches:
            patches.replace(Base, "static", ten_more)
            patches.replace(Base, "static", twice)
            assert Base.static(1) == 22
        assert vars(Base)["static"] is raw


class TestSomebodyElseOnTop:
    """``other`` stands for a plugin that saves what it finds and puts it back later (ms-swift's NaN guard)."""

    def patched_over(self, *, wraps: bool) -> tuple[Patch, Any, Callable[[], None]]:
        raw = vars(Base)["static"]
        patch = Patch(Base, "static", ten_more)
        patch.apply()
        ours = vars(Base)["static"]
        saved = Base.static

        def other(x: int = 1) -> int:
            return 100 * saved(x)

        if wraps:
            other = functools.wraps(saved)(other)
        Base.static = staticmethod(other)  # type: ignore[method-assign, assignment]

        def take_back() -> None:
            Base.static = ours  # type: ignore[method-assign]

        return patch, raw, take_back

    @pytest.mark.parametrize("wraps", [True, False])
    def test_wrapper_stays_inert(self, wraps: bool) -> None:
        patch, raw, take_back = self.patched_over(wraps=wraps)
        assert Base.static(1) == 1100
        assert not patch.restore()
        assert Base.static(1) == 100
        take_back()
        assert Base.static(1) == 1
        assert patch.restore()
        assert vars(Base)["static"] is raw

    @pytest.mark.parametrize("wraps", [True, False])
    def test_applied_again_below_the_other(self, wraps: bool) -> None:
        patch, raw, take_back = self.patched_over(wraps=wraps)
        patch.restore()
        patch.apply()
        assert Base.static(1) == 1100
        take_back()
        assert Base.static(1) == 11
        assert patch.restore()
        assert vars(Base)["static"] is raw

    def test_other_that_hides_what_it_calls_does_not_make_us_run_twice(self) -> None:
        raw = vars(Base)["static"]
        patch = Patch(Base, "static", ten_more)
        patch.apply()
        hidden[:] = [Base.static]
        Base.static = staticmethod(calls_hidden)  # type: ignore[method-assign, assignment]
        assert not patch.restore()
        patch.apply()
        assert Base.static(1) == 110
        patch.restore()
        assert Base.static(1) == 100
        Base.static = raw  # type: ignore[method-assign]

    def test_other_restores_the_original_over_us(self) -> None:
        raw = vars(Base)["static"]
        patch = Patch(Base, "static", ten_more)
        patch.apply()
        Base.static = raw  # type: ignore[method-assign]
        assert patch.restore()
        assert vars(Base)["static"] is raw
        patch.apply()
        assert Base.static(1) == 11
        patch.restore()

    def test_other_deletes_an_inherited_patch(self) -> None:
        patch = Patch(Child, "method", ten_more)
        patch.apply()
        del Child.method
        assert patch.restore()
        assert "method" not in vars(Child)

    def test_set_uses_a_wrapper_again_that_it_had_to_leave(self) -> None:
        raw = vars(Base)["static"]
        patches = PatchSet()
        patches.replace(Base, "static", ten_more)
        ours = vars(Base)["static"]
        saved = Base.static
        Base.static = staticmethod(lambda x=1: 100 * saved(x))  # type: ignore[method-assign, assignment]
        assert not patches.restore()
        assert not patches
        patches.replace(Base, "static", ten_more)
        assert Base.static(1) == 1100
        Base.static = ours  # type: ignore[method-assign]
        assert patches.restore()
        assert vars(Base)["static"] is raw


hidden: list[Any] = []


def calls_hidden(x: int = 1) -> int:
    return 100 * hidden[0](x)  # type: ignore[no-any-return]
