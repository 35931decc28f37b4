"""Workflows, rewards, tasks and retrievers by name or from a user's own file, anywhere on disk."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from envs.built_in import WORKFLOWS, load
from envs.text_files import short
from envs.workflow import Workflow
from srpo_jax.recipe.errors import RecipeError, nearest
from srpo_jax.recipe.paths import find_file
from srpo_jax.recipe.recipe import Recipe, RetrieverConfig, WorkflowConfig
from srpo_jax.recipe.servers import key_from_environment
from srpo_jax.rollout.user_code import raised_at


def load_object(spec: str, folder: Path | None = None) -> Any:
    """What ``path/to/file.py:Name`` names. The file's own folder can be imported from.

    Args:
        spec: the file and the name.
        folder: the recipe's, where the file is looked up first.

    Raises:
        RecipeError: the file is missing, fails to load (its line is named), or has no such name.
    """
    path, colon, name = spec.rpartition(":")
    if not colon or not path.endswith(".py") or not name.isidentifier():
        raise RecipeError(f"must be file.py:Name, got {spec!r}")
    module = _load_module(find_file(path, folder))
    if not hasattr(module, name):
        own = [
            key
            for key, value in vars(module).items()
            if not key.startswith("_") and getattr(value, "__module__", None) == module.__name__
        ]
        raise RecipeError(f"{path} has no {name!r}: {nearest(name, own)}")
    return getattr(module, name)


def build_workflow(recipe: Recipe, retriever: Any = None) -> Workflow:
    """The recipe's workflow.

    Args:
        recipe: names the workflow and its arguments.
        retriever: for a constructor that takes one; None: the recipe's own is built.

    Raises:
        RecipeError: an argument is wrong (the nearest valid one is named), or the class is no
            workflow.
    """

    def own() -> Any:
        config = recipe.retriever
        return None if config is None else build_retriever(config, recipe.folder)

    make = own if retriever is None else lambda: retriever
    return make_workflow(recipe.workflow, recipe.folder, make)


def make_workflow(
    config: WorkflowConfig, folder: Path | None, retriever: Callable[[], Any]
) -> Workflow:
    """A workflow from its section.

    ``args.preset`` chooses a preset of the class (``dr_mas``, ...; null: none); other args change
    it.

    Args:
        config: the section.
        folder: the recipe's.
        retriever: makes a retriever; called if the constructor takes one.

    Raises:
        RecipeError: as in :func:`build_workflow`.
    """
    cls, args = workflow_class(config, folder), dict(config.args)
    keywords, build = keywords_of(cls), cls
    if "preset" in args and hasattr(cls, "preset"):
        preset = args.pop("preset")
        build = cls if preset is None else partial(cls.preset, preset)
    if keywords is not None and "retriever" in keywords and "retriever" not in args:
        found = retriever()
        if found is not None:
            args["retriever"] = found
    return check_workflow(call_with_args(build, args, keywords, "workflow.args"))


def check_workflow(workflow: Any) -> Workflow:
    """The workflow itself.

    Raises:
        RecipeError: it does not name its roles, or has no ``run`` or ``reward`` of the protocol.
    """
    name = getattr(type(workflow), "__name__", "it")
    roles = getattr(workflow, "roles", None)
    listed = isinstance(roles, Sequence) and not isinstance(roles, str)
    if not listed or not roles or not all(isinstance(role, str) for role in roles):
        raise RecipeError(
            f"workflow: {name}.roles must be the names of its roles, like ('solver', 'judge'), "
            f"got {short(roles)}"
        )
    if not callable(getattr(workflow, "run", None)):
        raise RecipeError(f"workflow: {name} has no `async def run(self, task, team)`")
    _check_takes(workflow.run, f"workflow: {name}.run", "task", "team")
    if getattr(workflow, "reward", None) is not None:
        _check_takes(workflow.reward, f"workflow: {name}.reward", "task", "outcome", "team")
    return workflow


def _check_takes(function: Callable[..., Any], where: str, *arguments: str) -> None:
    """Raises RecipeError unless a function can be called with these positional arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in ones have none
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        raise RecipeError(
            f"{where} takes {signature}, but is called with ({', '.join(arguments)})"
        ) from None


def workflow_class(config: WorkflowConfig, folder: Path | None = None) -> Callable[..., Any]:
    """The class that a recipe's ``workflow`` section names; it makes workflows."""
    if config.name is not None:
        return load(WORKFLOWS[config.name].workflow)
    return load_object(str(config.path), folder)


def build_retriever(config: RetrieverConfig, folder: Path | None = None) -> Any:
    """BM25 over the corpus, or a client of the retrieval servers.

    Args:
        config: the recipe's section.
        folder: the recipe's, where a corpus is looked up first.

    Raises:
        RecipeError: the corpus is missing or cannot be read, or the servers' key is not set.
    """
    corpus = config.corpus
    if corpus is not None and corpus != "factbook":
        corpus = str(find_file(corpus, folder))
    api_key = key_from_environment(config.api_key_env, "retriever.api_key_env")
    try:
        if corpus is None:
            from envs.search.retrieval.http_client import HTTPRetriever

            return HTTPRetriever(
                config.urls,
                timeout=config.timeout,
                tries=config.retries + 1,
                api_key=api_key,
            )
        from envs.search.retrieval.bm25 import BM25Retriever
        from envs.search.retrieval.corpus import load_corpus

        return BM25Retriever(load_corpus(corpus))
    except ValueError as error:
        raise RecipeError(f"retriever: {error}") from error


def build_reward(recipe: Recipe) -> Callable[..., Any] | None:
    """The user's reward function, or None: the workflow's own reward is asked.

    Raises:
        RecipeError: the file cannot be loaded, or what it names takes no task and outcome.
    """
    if recipe.reward is None:
        return None
    function = load_object(recipe.reward.path, recipe.folder)
    return check_reward(function, f"reward.path: {recipe.reward.path}")


def check_reward(function: Any, where: str = "reward") -> Callable[..., Any]:
    """The function itself.

    Raises:
        RecipeError: it is no function of a task and an outcome; ``where`` names it.
    """
    if not callable(function):
        raise RecipeError(f"{where}: must be a function, got {short(function)}")
    _check_takes(function, where, "task", "outcome")
    return function


def call_with_args(
    function: Callable[..., Any],
    args: Mapping[str, Any],
    keywords: Collection[str] | None,
    where: str,
) -> Any:
    """What ``function(**args)`` returns.

    Args:
        function: a class or function of the user's, or one of ours.
        args: keyword arguments from a recipe.
        keywords: the names that it takes; None: any.
        where: the key path of the arguments, for messages.

    Raises:
        RecipeError: it does not take an argument, or raises an error of its own.
    """
    if keywords is not None:
        for name in args:
            if name not in keywords:
                raise RecipeError(f"{where}.{name}: unknown argument, {nearest(name, keywords)}")
    try:
        return function(**args)
    except RecipeError:
        raise
    except (TypeError, ValueError) as error:
        raise RecipeError(f"{where}: {error}") from error
    except Exception as error:
        raise RecipeError(f"{where}: {type(error).__name__}: {raised_at(error)}") from error


def keywords_of(function: Callable[..., Any]) -> dict[str, Any] | None:
    """Keyword arguments that a callable takes, with their defaults (``inspect.Parameter.empty``
    where there is none); None: any."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {p.name: p.default for p in parameters if p.kind in named}


def _load_module(path: Path) -> ModuleType:
    """Loads a file once per process, so that its classes keep their identity."""
    name = f"user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise RecipeError(f"{path}: Python has no loader for such a file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        if isinstance(error, SyntaxError) and error.filename == str(path):
            place = f"{path}:{error.lineno}" if error.lineno else str(path)
        else:
            place = place_in(path, error)
        raise RecipeError(f"{place}: {type(error).__name__}: {error}") from error
    return module


def place_in(path: Path, error: BaseException) -> str:
    """``file:line`` of the innermost line of a user's file that an error passed, or the file."""
    frames = traceback.extract_tb(error.__traceback__)
    line = next((f.lineno for f in reversed(frames) if f.filename == str(path)), None)
    return f"{path}:{line}" if line else str(path)
