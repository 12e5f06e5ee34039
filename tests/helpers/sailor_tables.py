"""The tables that the authors of Sailor published, with a few rows."""

from pathlib import Path

LAYERS = 26
"""Of OPT-350M: the embedding, 24 blocks, the head."""


def write_table(folder: Path, name: str, header: str, *rows: str) -> None:
    (folder / name).write_text("\n".join([header, *rows]) + "\n")


def write_tables(folder: Path) -> None:
    """OPT-350M on GH200 at tp 1; a model and a device that nobody knows; two nodes."""
    write_table(
        folder,
        "layer_profiles.csv",
        "model,gpu,micro_batch,tp,layer,fwd_s,bwd_s,update_s,source",
        "OPT-350,GH-96,1,1,0,0.001,0,0.01,x",
        "OPT-350,GH-96,1,1,1,0.009,0.009,0.01,x",
        *(f"OPT-350,GH-96,1,1,{layer},0.002,0.004,0.01,x" for layer in range(2, LAYERS - 1)),
        "OPT-350,GH-96,1,1,25,0.003,0.005,0.01,x",
        "LLAMA-3-8,GH-96,1,1,0,1,1,1,x",
        "OPT-350,TPU,1,1,0,1,1,1,x",
    )
    write_table(
        folder,
        "layer_memory.csv",
        "model,tp,layer,params_floats,act_output_floats,act_input_floats,act_mem_floats,"
        "params_bytes,act_output_bytes,act_input_bytes,act_mem_bytes",
        "OPT-350,1,0,60000000,0,0,0,0,100,0,200",
        *(f"OPT-350,1,{layer},10000000,0,0,0,0,100,0,300" for layer in range(1, LAYERS - 1)),
        "OPT-350,1,25,60000000,0,0,0,0,100,0,400",
    )
    write_table(
        folder,
        "collectives.csv",
        "gpu,precision,collective,gpus,data_mb,median_time_ms,samples",
        "GH-96,fp32,all_reduce,4,1,0.05,1",
        "GH-96,fp32,all_reduce,4,100,0.5,1",
        "GH-96,fp32,all_reduce,4,5120,1000000000.0,1",
        "GH-96,fp16,all_reduce,4,1,9,1",
        "GH-96,fp32,all_gather,4,1,9,1",
    )
    write_table(
        folder,
        "p2p.csv",
        "gpu,precision,scope,data_mb,bandwidth_raw",
        "GH-96,fp32,intra,1,10",
        "GH-96,fp32,intra,64,100",
        "GH-96,fp32,inter,1,1",
        "A100-40,fp32,intra,1,20",
    )
    zone = "us-central1-a"
    write_table(
        folder,
        "network_fits.csv",
        "scope,src_zone,src_gpu,src_gpus,dst_zone,dst_gpu,dst_gpus,c2,c1,c0,max_bytes_per_s",
        f"inter,{zone},GH-96,1,{zone},GH-96,1,0,5,10,40000000000",
        f"inter,{zone},GH-96,4,{zone},GH-96,4,0,20,40,160000000000",
        f"inter,{zone},A100-40,1,{zone},GH-96,1,0,1,-3,9000000000",
        f"inter,{zone},A100-40,1,us-west1-b,A100-40,1,0,0,0.5,9000000000",
    )
