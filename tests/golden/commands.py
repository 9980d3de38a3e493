"""The command lines whose behaviour is kept: name of a golden file -> name of a case -> its command lines.

`recording.record` explains the words TERMINAL and ``<``. The folder holds the pictures star, ring, square and
circle (.png, 128x128), photos/ with two of them, empty/, cut.png (broken), notes.txt (no picture), and the files of
``inputs``.
"""

from pathlib import Path

from hookscope.cli.main import COMMANDS

REFUSALS = Path(__file__).with_name("refusals.txt").read_text().splitlines()
"""Command lines that are refused: each ends with one line of error and writes nothing."""
SQUEEZE = "squeezenet1_1 star.png --weights none --input-size 64"
RESNET = "resnet18 star.png --weights none --seed 3 --input-size 64"
CASES: dict[str, dict[str, str]] = {
    "visualize": {
        "one layer": "visualize shapes star.png --layer 0",
        "several layers to a folder": "visualize shapes star.png --layer 0:3,-1 --channels 0-3 -o out/ --format csv",
        "standard output": "visualize shapes star.png --layer 1 --channels 0,2,5 -o -",
        "standard input": "visualize shapes - --layer features.0 --channels 0-3 -o in.png --format json < star.png",
        "two pictures": "visualize shapes star.png ring.png --layer 1 --channels 0-1 --format ndjson",
        "type, grid and colours": "visualize shapes star.png --type ReLU --layer 0 --channels top:6:max --columns 3"
        " --cell 80 --cmap magma -o relu.png",
        "symmetric": "visualize shapes star.png --layer 2 --channels top:4 --scale symmetric -o s.png --format table",
        "percentile": "visualize shapes star.png --layer 2 --channels top:4:std --scale percentile:2,98 -o p.png",
        "scale of the layer": "visualize shapes star.png --layer 2 --channels top:4:mean --scale layer -o l.png",
        "fixed scale": "visualize shapes star.png --layer 2 --channels 0-3 --scale=-1:2 -o f.png",
        "scale that begins with a minus": "visualize shapes star.png --layer 2 --channels 0-3 --scale -1:2 -o f.png",
        "channels beyond": "visualize shapes star.png --layer 0 --channels 62-99 -o b.png",
        "overlay": "visualize shapes star.png --layer features.3.squeeze --channels 0-3 --overlay -o o.png",
        "plain": "visualize shapes star.png --layer 're:^features.4.squeeze$' --channels 0-8 --plain -o plain.png",
        "random model": f"visualize {SQUEEZE} --layer 0 --channels 0-1 --preprocess stretch -o r.png",
        "model from a file": "visualize nets.py:small star.png --layer relu#1 -o small.png --preprocess none",
        "not finite": "visualize nets.py:nan star.png --layer conv2 -o nan.png",
        "every leaf": "visualize nets.py:small star.png --type all --layer 0:4 -o out/ --channels 1",
        "turned and transparent pictures": "visualize nets.py:small turned.jpg rgba.png --layer conv1 -o out/",
        "two frames of optical flow": "visualize raft_small star.png --weights none --layer"
        " feature_encoder.convnormrelu.0 --channels 0-3",
        "bars of a vector": "visualize nets.py:small star.png --layer fc -o fc.png",
        "strongest of many channels": "visualize shapes star.png --layer 18 -o deep.png",
        "dead channels": "visualize nets.py:sick star.png --type ReLU --layer 0 -o sick.png",
    },
    "inspect": {
        "one image": "inspect shapes star.png",
        "a folder to a folder": "inspect shapes photos --layer features.3.* -o out/ --format ndjson",
        "table": "inspect shapes star.png ring.png --format table",
        "json of a sick model": "inspect nets.py:sick star.png -o page.html --format json",
        "not finite": "inspect nets.py:nan star.png --format csv",
        "random weights": f"inspect {SQUEEZE} --layer 0:2 --format table",
        "standard input": "inspect shapes - --layer 0 --target 3 --max-size 1MB < star.png",
    },
    "predict": {
        "top classes": "predict shapes star.png",
        "table": "predict shapes star.png ring.png --top 2 --format table",
        "json": "predict shapes square.png --top 3 --format json",
        "ndjson from standard input": "predict shapes - --top 1 --format ndjson < ring.png",
        "named classes": "predict shapes star.png --target triang,0,top:1 --format csv",
        "random weights": f"predict {SQUEEZE} --top 2",
        "weights that cannot be had": "predict squeezenet1_1 star.png --input-size 64 --top 1",
        "categories": "predict nets.py:small star.png --categories names.txt --top 2",
        "model without categories": "predict nets.py:small star.png --input-size 32x48 --preprocess stretch",
        "not finite": "predict nets.py:nan star.png",
        "safetensors": "predict nets.py:small star.png --weights small.safetensors",
        "wrapped state dict": "predict nets.py:small star.png --weights small.pth --top 1",
        "grey, deep, transparent and turned pictures": "predict nets.py:small grey.png deep.png rgba.png turned.jpg"
        " --top 1 --preprocess none",
        "segmentation": "predict lraspp_mobilenet_v3_large star.png --weights none --input-size 64 --top 2",
        "one of two is broken": "predict shapes cut.png star.png --top 1",
    },
    "cam": {
        "gradcam": "cam shapes star.png",
        "gradcam++": "cam shapes star.png --method gradcam++ --layer features.12 --raw map.npy -o a.png",
        "hirescam": "cam shapes star.png --method hirescam --layer features.12 -o a.png --cmap viridis",
        "layercam": "cam shapes star.png --method layercam --layer features.7.squeeze,features.12 -o a.png"
        " --format json",
        "xgradcam": "cam shapes star.png --method xgradcam --layer features.9 -o a.png",
        "eigencam": "cam shapes star.png --method eigencam --layer features.12 -o a.png --format table",
        "scorecam": "cam shapes star.png --method scorecam --layer features.3.squeeze -o a.png --batch-size 8",
        "ablationcam": "cam shapes star.png --method ablationcam --layer features.3.squeeze -o a.png",
        "fuse": "cam shapes star.png --layer features.7,features.12 --fuse -o a.png",
        "targets and raw": "cam shapes star.png ring.png --target top:2 --raw maps.npz -o out/ --format ndjson",
        "sheet": "cam shapes star.png --sheet sheet.png --target star -o a.png",
        "sheet of classes": "cam shapes star.png --layer features.3.squeeze,features.10 --target top:3"
        " --sheet sheet.png -o out/",
        "standard output": "cam shapes - -o - < star.png",
        "nothing above 0": "cam nets.py:small star.png --layer conv1 --target 0 -o a.png",
        "residual network": f"cam {RESNET} --layer layer2 -o a.png --format csv",
    },
    "saliency": {
        "gradient": "saliency shapes star.png",
        "gradient-input": "saliency shapes star.png --method gradient-input --target 0 -o a.png --cmap viridis",
        "smoothgrad": "saliency shapes star.png --method smoothgrad --samples 4 --noise 0.1 --seed 2 -o a.png",
        "integrated-gradients": "saliency shapes star.png --method integrated-gradients --steps 12 --batch-size 6"
        " --raw a.npy -o a.png --format json",
        "too few steps": "saliency shapes star.png --method integrated-gradients --steps 1 -o a.png --format table",
        "guided-backprop": "saliency shapes star.png --method guided-backprop -o a.png --format csv",
        "two pictures": "saliency shapes star.png ring.png --target top:2 --raw a.npz -o out/ --format ndjson",
        "standard output": "saliency shapes star.png -o -",
    },
    "gradients": {
        "layers": "gradients shapes star.png --layer 0:4",
        "table": "gradients shapes star.png --layer 'features.3*' --format table",
        "json": "gradients shapes star.png --layer 're:features.12.sq' --loss cross-entropy --target 3 --format json",
        "parameters": "gradients nets.py:small star.png --parameters --loss mse",
        "ndjson": "gradients nets.py:small star.png --type ReLU --format ndjson",
        "two classes": "gradients shapes star.png --target 1,2 --layer 3 --format table",
        "changes": "gradients nets.py:small star.png --parameters --freeze conv1,fc.bias --clip-value 0.01 --scale -2"
        " --clamp-sign positive --clip-norm 0.05 --format csv",
        "findings": "gradients nets.py:small star.png --threshold vanishing=1e9 --threshold exploding=1e10"
        " --format table",
        "detached": "gradients nets.py:detached star.png --format json",
        "frozen": "gradients nets.py:sick star.png --format table",
        "anomaly": "gradients nets.py:nan star.png --detect-anomaly --format json",
        "plot": "gradients shapes star.png --layer 3:8 --plot flow.png",
        "plot as svg": "gradients nets.py:small star.png --plot flow.svg",
    },
    "intervene": {
        "zero": "intervene shapes star.png --at features.3.squeeze zero --layer 23:26",
        "negative indices": "intervene shapes star.png --at features.3.squeeze zero --layer -3:",
        "table": "intervene shapes star.png --at features.3 zero:channels=0-31 --layer 3:8 --format table",
        "json": "intervene shapes star.png --at features.9.squeeze scale:factor=2,positions=0-3x2-5 --format json"
        " --layer 're:features.9' --target 3",
        "ndjson": "intervene shapes star.png --at 0 clamp:min=0,max=1 --layer 0:2 --format ndjson",
        "classes": "intervene shapes star.png --at 0 noise:std=0.5,relative=true --seed 4 --classes",
        "dropping": "intervene shapes star.png --at 0 dropblock:p=0.2,block_size=5 --at 4 dropout:p=0.3"
        " --at 5 dropout2d:p=0.5 --seed 1 --layer 0:6",
        "mean": "intervene shapes star.png --at features.4.squeeze mean:from=photos --at features.9.squeeze"
        " mean:over=positions --classes --format csv",
        "patch and grid": "intervene shapes star.png --at features.4.squeeze patch:from=ring.png --grid grid.png"
        " --layer features.4.squeeze",
        "permute and quantize": "intervene shapes star.png --at 1 permute:axis=channels --at 2 quantize:bits=3"
        " --classes",
        "parameters": "intervene shapes star.png --at features.3 prune:amount=0.7 --at features.0.weight"
        " quantize:bits=2,per_channel=true --at features.12 freeze --classes",
        "input": "intervene shapes star.png --at features.3 zero:on=input --layer features.3.squeeze --format table",
        "ablate each": "ablate shapes star.png --layer features.3.squeeze --top 5",
        "ablate each plotted": "ablate shapes star.png --layer features.12.squeeze --top 4 --plot worth.png",
        "ablate each in a table": "ablate nets.py:small star.png --layer conv1 --format table",
        "ablate each in json": "ablate nets.py:small star.png --layer conv1,conv2 --top 3 --format json",
        "--at and --ablate-each": "ablate nets.py:small star.png --at conv1 zero:channels=1 --layer conv1",
        "nothing changed": "intervene nets.py:small star.png --at conv1 dropout:p=0.5,when=train",
        "without effect": "intervene nets.py:small star.png --at fc clamp:min=-1e9 --at conv1 freeze --classes",
        "steer": "intervene nets.py:small star.png --at conv1 steer:from=direction.npy,scale=3 --classes",
    },
    "exemplars": {
        "rows": "exemplars shapes star.png ring.png --layer features.10 --channels 0,51 --bottom",
        "table": "exemplars shapes photos --layer features.3 --channels 0-2 --top 1 --rank-by mean --format table",
        "folder and page": """
            exemplars nets.py:small star.png ring.png --layer conv1 --channels 0-1 -o found --html page.html
            exemplars nets.py:small star.png ring.png --layer conv1 --channels 0-1 -o found
            exemplars nets.py:small star.png ring.png --layer conv1 --channels 0-1 -o found --resume --format json
        """,
    },
    "stats": {
        "table": "stats shapes star.png ring.png --layer 'features.3.*' --format table",
        "tsv": "stats shapes photos --layer 0:4",
        "json": "stats shapes star.png --layer 're:features.12.expand1x1' --format json",
        "rank": "stats shapes photos circle.png --layer features.3.squeeze --rank --threshold low-rank=60%"
        " --format json",
        "per channel": "stats nets.py:small star.png --type BatchNorm2d --layer 0 --per-channel",
        "per channel in ndjson": "stats nets.py:sick star.png --layer conv1 --per-channel --format ndjson",
        "findings": "stats nets.py:sick star.png ring.png --format table --type all --layer all"
        " --threshold few-images=2",
        "findings without a row": "stats nets.py:sick photos circle.png --type Conv2d --layer all",
        "findings without a row of a channel": "stats nets.py:sick photos --per-channel --layer conv1,bn1 --format csv",
        "findings in ndjson": "stats nets.py:sick star.png --threshold dead-share=5% --threshold exploding=1"
        " --format ndjson",
        "thresholds": "stats shapes photos --layer 5:8 --threshold saturated-share=1% --threshold vanishing=0.5"
        " --threshold duplicate-correlation=0.2"
        " --threshold drift-shift=0.1 --threshold drift-ratio=1.5 --format csv",
        "not finite": "stats nets.py:nan star.png --format table",
        "skipped pictures": "stats nets.py:small star.png cut.png notes.txt --layer conv1",
        "limit, batches and names from a file": "stats nets.py:small --files0-from names0.txt --batch-size 1 --limit 2"
        " --layer conv1",
        "save, merge, resume": """
            stats nets.py:small star.png --save a.json --layer conv1
            stats nets.py:small ring.png --save b.json --layer conv1
            merge a.json b.json
            merge a.json b.json --format json
            stats nets.py:small star.png --save a.json --layer conv1 --resume
            stats nets.py:small star.png --save a.json --layer conv2 --resume
        """,
        "plot": "stats nets.py:sick photos --plot stats.png --format table",
        "tensorboard": "stats nets.py:small star.png --layer conv1 --tensorboard board",
    },
    "extract": {
        "one layer": "extract shapes star.png ring.png --layer features.12 --pool mean -o features.npz",
        "several columns": "extract shapes photos --layer 0,features.12 --pool max --dtype float16 --logits"
        " --target star -o features.safetensors --format table",
        "skipped pictures": "extract nets.py:small star.png cut.png notes.txt --layer conv1 -o a.npy --format json",
        "an output that exists": """
            extract nets.py:small star.png --layer conv1 -o a.npz
            extract nets.py:small ring.png --layer conv1 -o a.npz
            extract nets.py:small ring.png --layer conv1 -o a.npz --resume
            extract nets.py:small ring.png --layer conv1 -o a.npz --overwrite
        """,
    },
    "check": {
        "all is well": "check shapes star.png --no-nan --max-abs 1e4 --format table",
        "every limit": "check shapes star.png --max-dead 10% --max-saturated 5% --no-nan --max-abs 1e4 --min-rank 1"
        " --format table",
        "dead": "check shapes star.png --max-dead 0.05 --layer 're:features.1[12]'",
        "several limits": "check nets.py:sick photos --max-dead 0 --max-saturated 10% --max-abs 0.5 --min-rank 5 "
        "--format json",
        "not finite": "check nets.py:nan star.png --no-nan --format table",
        "allow and junit": "check nets.py:sick star.png --max-dead 0 --allow relu --junit report.xml --format csv",
        "ndjson": "check nets.py:sick star.png --max-dead 5% --format ndjson",
    },
    "weights": {
        "table": "weights nets.py:sick --format table",
        "tsv": "weights shapes --layer features.3",
        "json": "weights nets.py:sick --format json --threshold dead-norm=0.9 --threshold duplicate-cosine=0.5",
        "ndjson": "weights resnet18 --weights none --layer layer1.0 --format ndjson",
        "kernels": "weights shapes --layer features.0 --kernels kernels.png --channels top:16 --columns 8 --cell 20",
        "kernels of a deep layer": "weights shapes --layer features.3.expand3x3 --kernels kernels.png --channels 0-5"
        " --cmap PuOr --format csv",
        "plot": "weights nets.py:sick --plot weights.png",
    },
    "plan": {
        "table": "plan shapes --batch-size 4 --train --optimizer adamw --memory 1GB --top 6 --format table",
        "rows of inference": "plan nets.py:small --input-size 32",
        "json of a checkpointed block": "plan nets.py:small --input-size 32 --train --checkpoint conv2 --format json",
        "totals": "plan shapes --batch-size 16 --dtype bfloat16 --memory 1MB --total --format csv",
    },
    "verify": {
        "shapes": "verify shapes star.png",
        "without a picture": "verify nets.py:small --format json",
        "random weights": f"verify {RESNET} --format table --layer 'layer1*'",
        "types": "verify shapes ring.png --type Conv2d --type ReLU --format csv",
        "not finite": "verify nets.py:nan star.png --format ndjson",
    },
    "trace": {
        "layers": "trace shapes star.png --layer 0:3",
        "table": "trace nets.py:small star.png --format table",
        "json": "trace nets.py:small star.png --type Conv2d --format json",
        "events": "trace nets.py:small star.png --events",
        "events in a table": "trace nets.py:small star.png --events --target 2 --type ReLU --type Linear"
        " --format table",
        "events cut off": "trace nets.py:detached star.png --events --format ndjson",
        "events with names of classes": "trace nets.py:small star.png --events --categories names.txt --format table",
        "values in tsv": "trace nets.py:ones star.png --input-size 4 --preprocess stretch --values --max-values 12"
        " --type all --layer 0,3",
        "values": "trace nets.py:ones star.png --input-size 4 --preprocess stretch --values --format table",
        "values of events": "trace nets.py:ones star.png --input-size 4 --preprocess stretch --values --max-values 12"
        " --events --format json",
        "standard input": "trace nets.py:nan - --format csv < star.png",
        "index that is a name": "trace nets.py:ones star.png --input-size 4 --preprocess stretch --layer 1",
        "search for NaN": "find-nan nets.py:nan star.png --format table",
        "search for NaN in json": "find-nan nets.py:nan star.png --format json",
        "search for NaN without any": "find-nan shapes star.png",
        "optical flow": "trace raft_small star.png ring.png --weights none --layer 'feature_encoder.convnormrelu.*'",
    },
    "watch": {
        "training": """
            watch --every 2 --stop-on non-finite --log log.ndjson -- train.py --nan
            show-run log.ndjson
        """,
        "show a run": "show-run run.ndjson",
        "show a run in a table": "show-run run.ndjson --format table",
        "show a run in json": "show-run run.ndjson --format json",
        "plot a run": "show-run run.ndjson --plot run.png --format ndjson",
    },
    "listing": {
        "layers": "list-layers shapes",
        "layers in a table": "list-layers nets.py:small --type all --format table",
        "layers in json": "list-layers resnet18 --type Conv2d --type Linear --input-size 64x96 --format json",
        "layers again, from the cache": """
            list-layers squeezenet1_1 --type 'Max*' --format csv
            list-layers squeezenet1_1 --type 'Max*' --format csv
        """,
        "layers in ndjson": "list-layers nets.py:small --format ndjson",
        "layers of a quantized model": "list-layers quantized_mobilenet_v2 --input-size 64",
        "models": "list-models 'resnet*' --format table",
        "models by a part": "list-models squeeze",
        "models by an expression": "list-models 're:^(shapes|raft_.*|resnet18)$' --format json",
        "quantized models": "list-models 'quantized_m*' --format ndjson",
        "layers of the default model": "list-layers --format table",
        "totals": "list-layers nets.py:small --input-size 72x80 --type ReLU --type Conv2d --total",
        "totals in a table": "list-layers nets.py:small --input-size 72x80 --type Linear --total --format table",
        "totals of a real pass": "list-layers ssdlite320_mobilenet_v3_large --type MaxPool2d --type Hardsigmoid"
        " --format table",
        "totals without a convolution": "list-layers nets.py:ones --input-size 4 --type Linear --total --format json",
        "clips, and again from the cache": """
            list-layers r3d_18 --input-size 5x64x72 --type Linear --format table
            list-layers r3d_18 --input-size 5x64x72 --type Linear --format table
        """,
        "tree": "graph nets.py:small --input-size 72x80 --format table",
        "tree and graph": "graph shapes --depth 2 --format csv -o net.svg",
        "completion": "completion bash",
        "completion of zsh": "completion zsh",
        "completion of the named shell": "completion",
        "completion of fish": "completion fish",
        "version": "--version",
    },
    "compare": {
        "the same": "compare shapes shapes star.png --format table",
        "other images": "compare shapes shapes star.png --image-b ring.png --format table",
        "no normalisation": "compare shapes shapes photos --mean-b 0 --std-b 1 --format json --top 3",
        "intervention": "compare shapes shapes star.png --at-b features.7 scale:factor=2 --format csv --plot p.png",
        "other weights": "compare nets.py:small nets.py:small star.png --seed-b 1 --weights-b small.pth --format table",
        "not finite": "compare nets.py:small nets.py:nan star.png --format ndjson",
        "gate": "compare nets.py:small nets.py:sick star.png --max-relative 1 --min-cosine 0.9 --junit r.xml",
    },
    "help": {"hookscope": "--help", **{name: f"help {name}" for name in COMMANDS}},
    "refusals": {line: line for line in REFUSALS},
}
