"""Guards of a split against other people's code; taking one of these out must break some case."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

from devicebridge.nodes.host.split import attachments, patcher, sampling, tree
from devicebridge.parallel.local.borrow import Borrowed
from devicebridge.parallel.local.bridge import Bridge


def _nothing(self: Any) -> Any:
    return contextlib.nullcontext()


def _instead(target: Any, name: str, function: Any) -> Callable[[], Any]:
    return lambda: mock.patch.object(target, name, function)


GUARDS: Mapping[str, Callable[[], Any]] = {
    "copies are forgotten behind other people's code": _instead(Bridge, "forget", lambda self: None),
    "what blocks write is written back": _instead(Bridge, "_write_back", lambda self, module, output, goes_to: output),
    "what patches write is carried back": _instead(Borrowed, "settle", lambda self, back: None),
    "what is attached is seen": _instead(tree, "seen_attachments", lambda options: []),
    "overlap looks at what is attached": _instead(sampling, "reasons_against_overlap", lambda *args: iter(())),
    "replaced methods go by relay": _instead(tree, "replaced_methods", lambda model: []),
    "exchanged lists go by relay": _instead(tree.SplitTree, "_is_in_place", lambda self, name: True),
    "what runs unseen is looked for": _instead(tree, "unseen_attachments", lambda *args: ()),
    "an override with tensors runs at home": _instead(attachments, "holds_tensors", lambda function: False),
    "other layers are loaded anew": _instead(patcher._CardPatcher, "_without_other_objects", lambda self, extra: extra),
    "object patches lie under injections": _instead(patcher.ShardMixin, "_own_part", _nothing),
    "adapters go where their layer is": _instead(patcher.SplitMixin, "_place_bypass_adapters", lambda self: None),
}
