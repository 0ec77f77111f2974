.PHONY: check lint types test test-all reference workflows clean

# Lint, types and the fast tests: under two minutes on two cores, no download.
check: lint types test

lint:
	ruff check .
	ruff format --check .

# The folders cli, weights and bench are installed below redrafter_mlx (see pyproject.toml), which
# a type checker does not see; symlinks show it the package as it is installed.
types:
	rm -rf build/typing && mkdir -p build/typing/redrafter_mlx
	ln -s $(addprefix $(CURDIR)/,$(wildcard redrafter_mlx/*)) build/typing/redrafter_mlx/
	ln -s $(addprefix $(CURDIR)/,cli weights bench) build/typing/redrafter_mlx/
	cd build/typing && for system in linux darwin; do mypy --platform $$system --config-file $(CURDIR)/pyproject.toml --explicit-package-bases -p redrafter_mlx || exit 1; done

test:
	python -m pytest -q -n 2 -m "not slow and not real_model and not real_model2 and not exhaustive and not parity"

# Everything, with the real SmolLM2-135M (98 MB, fetched on first use).
test-all:
	python -m pytest -q -n 2

# The page of all commands and options.
reference:
	TERMINAL_WIDTH=100 typer redrafter_mlx.cli.main utils docs --name redrafter-mlx --output docs/reference/commands.md

# The files of continuous integration: GitHub's schema, and what makes them unsafe.
workflows:
	check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/*.yml
	zizmor --offline .github/workflows

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
